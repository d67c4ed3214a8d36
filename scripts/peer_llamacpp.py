"""llama.cpp's server on the workload of `orca-dist bench offline`: one line, as its --json says it.

Needs its `llama-server` and nothing else, and the model as a GGUF file: `convert_hf_to_gguf.py
--outtype f32 FOLDER`, or bf16. Makes the workload file if there is none.
"""

from __future__ import annotations

import argparse
import json
import shlex
import socket
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection

from peer_workload import NUM_REQUESTS, WARM_UP, Request, arguments, read_workload, result

HOST = "127.0.0.1"
LOADING = 503
HEALTH_INTERVAL_S, TIMEOUT_S = 0.1, 600.0


@contextmanager
def server(options: argparse.Namespace, slot_len: int) -> Iterator[int]:
    """The port of one that has loaded the model, each of its slots with `slot_len` tokens."""
    port = free_port()
    process = subprocess.Popen(
        command(options, port, slot_len), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        wait_until_loaded(process, port)
        yield port
    finally:
        process.terminate()
        process.wait()


def command(options: argparse.Namespace, port: int, slot_len: int) -> list[str]:
    """As many threads for prompts as for answers; no cache of prompts."""
    flags = {
        "--model": options.model,
        "--host": HOST,
        "--port": port,
        "--threads": options.threads,
        "--threads-batch": options.threads,
        "--parallel": options.slots,
        "--ctx-size": options.slots * slot_len,
        "--cache-ram": 0,
    }
    return [options.server, *(str(part) for pair in flags.items() for part in pair)]


def free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


def wait_until_loaded(process: subprocess.Popen[bytes], port: int) -> None:
    while not is_loaded(port):
        if process.poll() is not None:
            called = shlex.join(map(str, process.args))
            raise SystemExit(
                f"the server ended with {process.returncode}; run it by hand: {called}"
            )
        time.sleep(HEALTH_INTERVAL_S)


def is_loaded(port: int) -> bool:
    with suppress(OSError), closing(HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
        connection.request("GET", "/health")
        return connection.getresponse().status != LOADING
    return False


def run(port: int, requests: list[Request]) -> float:
    """Seconds until the last answer, a connection for each request; each has exactly its `out`
    tokens."""
    with ThreadPoolExecutor(len(requests)) as pool:
        start_s = time.perf_counter()
        answers = list(pool.map(lambda request: complete(port, request), requests))
        took_s = time.perf_counter() - start_s
    for answer, request in zip(answers, requests, strict=True):
        assert len(answer) == request["out"], (len(answer), request["out"])
    return took_s


def complete(port: int, request: Request) -> list[int]:
    """The tokens of the answer."""
    body = {
        "prompt": request["prompt"],
        "n_predict": request["out"],
        "temperature": 0,
        "ignore_eos": True,
        "return_tokens": True,
        "cache_prompt": False,
    }
    with closing(HTTPConnection(HOST, port, timeout=TIMEOUT_S)) as connection:
        connection.request("POST", "/completion", json.dumps(body))
        return json.load(connection.getresponse())["tokens"]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--server", default="llama-server", help="the program")
    parser.add_argument("--slots", type=int, default=NUM_REQUESTS // 2, help="requests in a batch")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    requests = read_workload(options)
    slot_len = max(len(request["prompt"]) + request["out"] for request in requests)
    start_s = time.perf_counter()
    with server(options, slot_len) as port:
        startup_s = time.perf_counter() - start_s
        run(port, WARM_UP)
        wall_s = run(port, requests)
    print(result(requests, wall_s=wall_s, startup_s=startup_s))


if __name__ == "__main__":
    main()
