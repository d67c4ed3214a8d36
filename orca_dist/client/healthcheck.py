"""One health check and an exit code: `python -m orca_dist.client.healthcheck`.

For probes of containers, which ask every few seconds: starts in a fraction of what the
commands of orca-dist take. Needs no API key.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from orca_dist.client.channel import DEFAULT_ADDRESS, Tls
from orca_dist.client.sync_client import Client
from orca_dist.errors import OrcaError

TIMEOUT_S = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """0: the server serves; 1: it does not, or nobody answers, and stderr says which."""
    asked = _parser().parse_args(arguments)
    try:
        with Client(asked.address, tls=_tls(asked)) as client:
            is_serving = client.health(timeout_s=asked.timeout_s)
    except OrcaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if is_serving or asked.live:
        return 0
    print(f"{asked.address} is not serving: it starts, recovers or ends", file=sys.stderr)
    return 1


def _tls(asked: argparse.Namespace) -> Tls | None:
    if not asked.tls_ca:
        return None
    return Tls(
        ca=asked.tls_ca,
        cert=asked.tls_client_cert,
        key=asked.tls_client_key,
        server_name=asked.tls_server_name,
    )


def _parser() -> argparse.ArgumentParser:
    """Names are those of `orca-dist info`."""
    parser = argparse.ArgumentParser(prog="orca_dist.client.healthcheck", description=main.__doc__)
    parser.add_argument("--address", default=os.environ.get("ORCA_ADDRESS", DEFAULT_ADDRESS))
    parser.add_argument("--live", action="store_true", help="any answer will do")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    parser.add_argument("--tls-ca", type=Path, help="talk TLS, and trust this CA")
    parser.add_argument("--tls-client-cert", type=Path)
    parser.add_argument("--tls-client-key", type=Path)
    parser.add_argument("--tls-server-name", default="")
    return parser


if __name__ == "__main__":
    sys.exit(main())
