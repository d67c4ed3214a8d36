"""Where two neighbours meet to build their link: one key-value store an epoch.

Stage 0 hosts it on its cluster address, through a socket bound beforehand: the
port can't be lost to another process, and no other interface listens.
"""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist


def host_store(host: str, timeout_s: float) -> tuple[dist.TCPStore, str]:
    """A new store on `host` and its address, host:port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
    return store, f"{host}:{port}"


def join_store(address: str, timeout_s: float) -> dist.TCPStore:
    """The store that another stage hosts at host:port."""
    host, _, port = address.rpartition(":")
    return dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout_s))


def pair_store(store: dist.Store, epoch: int, upstream: int) -> dist.PrefixStore:
    """The corner of the store that belongs to the link upstream -> upstream + 1."""
    return dist.PrefixStore(f"epoch{epoch}/link{upstream}-{upstream + 1}", store)
