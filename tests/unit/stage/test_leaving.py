"""A stage's links are aborted when its epoch is over, or a device that waits in one is stuck."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from orca_dist.proto.v1.control_pb2 import Open, Setup
from orca_dist.stage.device import CpuDevice
from orca_dist.stage.worker import EpochOver, StageWorker
from orca_dist.transport.channel import Channel
from orca_dist.transport.loopback import LoopbackChannel
from orca_dist.transport.nccl import NcclChannel

WAIT_S = 20.0


class StuckChannel(LoopbackChannel):
    """As one that waits for a peer which is gone: only abort() lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.is_aborted = threading.Event()

    def abort(self) -> None:
        self.is_aborted.set()


def open_stuck(
    monkeypatch: pytest.MonkeyPatch, channel: StuckChannel, is_stuck: threading.Event
) -> StageWorker:
    """A stage whose first link is made, and gets stuck as it is proven."""

    def open_links(
        config: object, store: object, epoch: int, on_made: Callable[[Channel], None]
    ) -> tuple[Channel | None, Channel | None]:
        on_made(channel)
        is_stuck.set()
        assert channel.is_aborted.wait(WAIT_S)
        raise EpochOver

    monkeypatch.setattr("orca_dist.stage.worker.open_links", open_links)
    monkeypatch.setattr("orca_dist.stage.worker.join_store", lambda address, timeout_s: None)
    worker = StageWorker(host="127.0.0.1")
    worker._setup, worker._device = Setup(num_stages=2), CpuDevice()
    return worker


def test_a_link_that_is_stuck_before_it_is_proven_is_aborted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channel, is_stuck = StuckChannel(), threading.Event()
    worker = open_stuck(monkeypatch, channel, is_stuck)
    errors: list[Exception] = []

    def run() -> None:
        try:
            worker.open(Open(epoch=1))
        except EpochOver as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert is_stuck.wait(WAIT_S)
    worker.end()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert len(errors) == 1


def test_an_epoch_that_is_over_makes_no_more_links(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = StuckChannel()
    worker = open_stuck(monkeypatch, channel, threading.Event())
    worker.end()
    with pytest.raises(EpochOver):
        worker.open(Open(epoch=1))
    assert not channel.is_aborted.is_set()


def test_a_new_epoch_has_links_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = StuckChannel(), StuckChannel()
    worker = open_stuck(monkeypatch, old, threading.Event())
    worker._note_link(old)
    following = worker.fresh()
    following._note_link(new)
    worker.end()
    assert old.is_aborted.is_set()
    assert not new.is_aborted.is_set()


class SlowGroup:
    """As NCCL's: an abort waits for the device, which another link's abort has to free."""

    def __init__(self, both: threading.Barrier) -> None:
        self._both = both

    def abort(self) -> None:
        self._both.wait(WAIT_S)


def test_aborts_of_two_links_wait_for_each_other_and_not_for_us() -> None:
    both = threading.Barrier(2)
    worker = StageWorker(host="127.0.0.1")
    for _ in range(2):
        worker._note_link(NcclChannel(SlowGroup(both), member=0, max_pending=2))
    worker.end()
    worker.close()
    worker.close()
    assert not both.broken
    assert both.n_waiting == 0


def test_an_epoch_that_is_over_as_its_links_are_there_is_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = StageWorker(host="127.0.0.1")

    def open_links(*_: object) -> tuple[None, None]:
        worker.end()
        return None, None

    monkeypatch.setattr("orca_dist.stage.worker.open_links", open_links)
    monkeypatch.setattr("orca_dist.stage.worker.join_store", lambda address, timeout_s: None)
    worker._setup, worker._device = Setup(num_stages=2), CpuDevice()
    with pytest.raises(EpochOver):
        worker.open(Open(epoch=1))
