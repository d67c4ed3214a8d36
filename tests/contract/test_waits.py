"""Stages and links wait for all that has to be waited for, each time because one line says so.

On the checked device, which keeps clocks of who knows of whose work. A GPU would show a missing
wait seldom and elsewhere; here it is a fault of its own, each time.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from orca_dist.device.checked import OrderFault
from orca_dist.stage.batch import PackedBatch
from orca_dist.stage.worker import StageWorker
from tests.fixtures.checkpoints import loud_llama
from tests.fixtures.graph_stage import graphs_of
from tests.fixtures.mutants import Wait, find_waits, without
from tests.fixtures.waits import (
    KINDS,
    Stages,
    greet,
    leave_epoch,
    loaded_stages,
    pass_tensors,
    run_stages,
    upload_tables,
)

WAITS = """
device.staging Upload.wait: self.copied.wait()
device.staging Upload.wait: self.device.hold(self.flat_N)
device.staging Uploads.send: self._device.record()
device.staging Uploads._filled: pinned.copied.synchronize()
device.staging download: device.record().synchronize()
device.staging download: device.record()
stage.worker StageWorker._input: iteration.batch.tables.wait()
stage.worker StageWorker._input: iteration.arrival.wait()
stage.worker StageWorker._input: self._device.hold(iteration.x_TH)
transport.group GroupArrival.wait: self.work.wait()
transport.group GroupChannel.greet: self.post_recv(probe).wait()
transport.group GroupChannel._post: pending[0][0].wait()
transport.host HostArrival.wait: self.inner.wait()
transport.host HostArrival.wait: copied.wait()
transport.host HostArrival.wait: self.free.wait()
transport.host HostArrival.wait: self.device.record()
transport.host HostChannel.post_recv: self._device.record()
transport.host HostChannel._copied: self._device.record()
transport.host HostChannel._copied: computed.wait()
transport.host HostChannel._copied: self._device.hold(x_TH)
transport.host HostChannel._copied: self._device.record()
transport.host HostChannel._forward: copied.synchronize()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return loud_llama(tmp_path_factory.mktemp("loud"))


@pytest.fixture(scope="module")
def stages(folder: Path) -> Stages:
    """Every kernel is launched."""
    return loaded_stages(folder, 3)


@pytest.fixture(scope="module")
def graph_stages(folder: Path) -> Stages:
    """Decodes are replayed."""
    return loaded_stages(folder, 3, graphs=True)


@pytest.mark.parametrize("kind", KINDS)
def test_links_wait(kind: str) -> None:
    pass_tensors(kind)


def test_a_link_is_proven() -> None:
    greet()


def test_tables_are_waited_for() -> None:
    upload_tables()


@pytest.mark.parametrize("kind", KINDS)
def test_stages_wait_and_answer_as_on_the_cpu(kind: str, stages: Stages) -> None:
    run_stages(kind, stages)


@pytest.mark.parametrize("kind", KINDS)
def test_replays_wait_and_answer_as_on_the_cpu(kind: str, graph_stages: Stages) -> None:
    run_stages(kind, graph_stages)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_replay_leaves_must_not_be_sent(
    kind: str, graph_stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one would write it while it is on its way: so it is copied."""
    monkeypatch.setattr("orca_dist.stage.graphs.kept", lambda y_TH: y_TH)
    with pytest.raises(OrderFault, match=r"aten::fill_ on compute uses .* may still be using"):
        run_stages(kind, graph_stages)


@pytest.mark.parametrize("kind", KINDS)
def test_static_buffers_must_not_be_filled_beside_a_replay(
    kind: str, graph_stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the stream that the tables came on, for one."""
    compute = StageWorker.compute

    def compute_beside(worker: StageWorker, x_TH: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        if batch.graph is not None:
            tables_N = batch.graph.tables_N
            with worker._device.inbound():
                graphs_of(worker)._tables_N[: len(tables_N)].copy_(tables_N)
        return compute(worker, x_TH, batch)

    monkeypatch.setattr(StageWorker, "compute", compute_beside)
    with pytest.raises(OrderFault, match=r"aten::copy_ on inbound uses .* on compute"):
        run_stages(kind, graph_stages)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_comes_into_memory_of_an_epoch_that_was_left(kind: str, stages: Stages) -> None:
    leave_epoch(kind, stages)


def test_every_wait_is_known() -> None:
    """Of the code as it is; what is added has to be listed, and is then deleted below."""
    assert [str(wait) for wait in find_waits()] == WAITS.strip().splitlines()


@pytest.mark.parametrize("wait", find_waits(), ids=str)
def test_no_wait_can_be_left_out(wait: Wait, stages: Stages) -> None:
    with without(wait), pytest.raises(OrderFault):
        run_all(stages)


@pytest.mark.parametrize(
    "wait", [w for w in find_waits() if ".transport." not in w.module], ids=str
)
def test_no_wait_beside_replays_can_be_left_out(wait: Wait, graph_stages: Stages) -> None:
    with without(wait), pytest.raises(OrderFault):
        run_all(graph_stages)


def run_all(stages: Stages) -> None:
    greet()
    upload_tables()
    for kind in KINDS:
        pass_tensors(kind)
    for kind in KINDS:
        run_stages(kind, stages)
        leave_epoch(kind, stages)
