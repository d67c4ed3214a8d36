"""NCCL on GPUs: a group that is aborted leaves process, device and weights as they were.

One GPU has room for a group of one member, which has all that opening and aborting touch. Two
have room for a link, whose peer is killed while a receive waits for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from orca_dist.device.cuda import CudaDevice
from orca_dist.transport.nccl import NcclChannel, nccl_channel, nccl_group
from orca_dist.transport.rendezvous import host_store, join_store, pair_store

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

HOST, TIMEOUT_S = "127.0.0.1", 60.0
ABORT_TAKES_S = 20.0  # it takes less than a second


@pytest.fixture
def weights() -> Iterator[torch.Tensor]:
    """Random, on the first GPU, and the same afterwards."""
    CudaDevice()
    made = torch.randn(1024, 1024, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    before = made.cpu()
    yield made
    assert torch.equal(made.cpu(), before)


def test_a_group_is_opened_aborted_and_opened_again(weights: torch.Tensor) -> None:
    _store, address = host_store(HOST, TIMEOUT_S)
    for epoch in range(3):
        own = pair_store(join_store(address, TIMEOUT_S), epoch, 0)
        group = nccl_group(own, member=0, size=1, timeout_s=TIMEOUT_S)
        sums = weights.sum(0)
        expected = sums.cpu()
        group.allreduce([sums]).wait()
        assert torch.equal(sums.cpu(), expected)
        channel = NcclChannel(group, member=0, max_pending=1)
        start_s = time.monotonic()
        channel.abort()
        channel.close()
        assert time.monotonic() - start_s < ABORT_TAKES_S


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two ends on one GPU")
def test_a_receive_from_a_peer_that_was_killed_is_aborted(weights: torch.Tensor) -> None:
    """And the next epoch's link to its successor works, on the same device."""
    _store, address = host_store(HOST, TIMEOUT_S)
    for epoch in range(2):
        peer = subprocess.Popen(
            [sys.executable, "-m", "tests.fixtures.nccl_peer", address, str(epoch)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        )
        try:
            receive_then_lose(peer, address, epoch)
        finally:
            peer.kill()
            peer.wait()


def receive_then_lose(peer: subprocess.Popen[bytes], address: str, epoch: int) -> None:
    """One tensor arrives; the next never does."""
    store = pair_store(join_store(address, TIMEOUT_S), epoch, 0)
    link = nccl_channel(store, member=1, timeout_s=TIMEOUT_S, max_pending=1)
    x_TH = torch.empty(4, 64, device="cuda")
    link.post_recv(x_TH).wait()
    assert torch.equal(x_TH.cpu(), torch.full((4, 64), float(epoch)))
    peer.kill()
    peer.wait()
    link.post_recv(x_TH).wait()  # the stream waits, this thread doesn't
    after = torch.cuda.Event()
    after.record()
    assert not after.query()
    start_s = time.monotonic()
    link.abort()
    link.close()
    after.synchronize()
    assert time.monotonic() - start_s < ABORT_TAKES_S
