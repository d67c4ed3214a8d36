"""The checked device itself: each kind of fault is one, and what is in order is none."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from orca_dist.device.checked import CheckedDevice, OrderFault
from orca_dist.device.staging import download

SHAPE = torch.Size([4, 8])
LINK = "link"


@pytest.fixture
def device() -> CheckedDevice:
    return CheckedDevice()


def ones(device: CheckedDevice) -> torch.Tensor:
    return torch.ones(SHAPE, device=device.torch_device)


def expect_fault(device: CheckedDevice, act: Callable[[], object], message: str) -> None:
    with pytest.raises(OrderFault, match=message), torch.inference_mode(), device.watching():
        act()
    with pytest.raises(OrderFault, match=message):
        device.check()


# ---- reads before a wait -----------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_stream_reads_what_another_writes(device: CheckedDevice, waits: bool) -> None:
    def act() -> None:
        with device.inbound():
            x = ones(device)
            written = device.record()
        if waits:
            written.wait()
        device.hold(x)
        x + 1

    if waits:
        with device.watching():
            act()
    else:
        expect_fault(device, act, "aten::add on compute uses .* aten::ones on inbound")


@pytest.mark.parametrize("waits", [True, False])
def test_the_host_reads_what_a_stream_writes(device: CheckedDevice, waits: bool) -> None:
    def act() -> None:
        host = device.pinned(SHAPE, torch.float32)
        host.copy_(ones(device), non_blocking=True)
        if waits:
            device.record().synchronize()
        assert host.numpy().sum() == 32

    if waits:
        with device.watching():
            act()
    else:
        expect_fault(device, act, "resolve_neg on thread .* aten::copy_ on compute")


def test_an_event_tells_only_of_what_came_before_it(device: CheckedDevice) -> None:
    def act() -> None:
        with device.inbound():
            early = device.record()
            x = ones(device)
        early.wait()
        x + 1

    expect_fault(device, act, "aten::add on compute")


def test_knowledge_is_passed_on_from_stream_to_stream(device: CheckedDevice) -> None:
    with device.watching():
        with device.inbound():
            x = ones(device)
            written = device.record()
        written.wait()
        passed_on = device.record()
        with device.outbound():
            passed_on.wait()
            x + 1
            device.hold(x)


def test_what_one_thread_waited_for_another_did_not(device: CheckedDevice) -> None:
    def act() -> None:
        host = device.pinned(SHAPE, torch.float32)
        host.copy_(ones(device), non_blocking=True)
        copied = device.record()
        thread = threading.Thread(target=copied.synchronize)
        thread.start()
        thread.join()
        host.sum()

    expect_fault(device, act, "aten::sum on thread")


# ---- buffers that are still in use -------------------------------------


def test_a_pinned_buffer_is_filled_while_a_copy_reads_it(device: CheckedDevice) -> None:
    def act() -> None:
        host = device.pinned(SHAPE, torch.float32).fill_(1)
        ones(device).copy_(host, non_blocking=True)
        host.fill_(2)

    expect_fault(device, act, "aten::fill_ on thread .* aten::copy_ on compute")


def test_a_tensor_is_received_while_it_is_computed_from(device: CheckedDevice) -> None:
    def act() -> None:
        x = ones(device)
        device.clocks.learn(LINK, device.clocks.of(device.stream))
        x + 1
        device.use(LINK, "receive", writes=[x])

    expect_fault(device, act, "receive on link uses .* aten::add on compute")


def test_a_tensor_is_written_while_it_is_sent(device: CheckedDevice) -> None:
    def act() -> None:
        x = ones(device)
        device.clocks.learn(LINK, device.clocks.of(device.stream))
        device.use(LINK, "send", reads=[x])
        x.add_(1)

    expect_fault(device, act, "aten::add_ on compute uses .* send on link")


# ---- memory that is dropped --------------------------------------------


@pytest.mark.parametrize("waits", [True, False])
def test_a_tensor_is_dropped_before_it_has_been_sent(device: CheckedDevice, waits: bool) -> None:
    def act() -> None:
        x = ones(device)
        device.clocks.learn(LINK, device.clocks.of(device.stream))
        sent = device.use(LINK, "send", reads=[x])
        if waits:
            sent.wait()

    if waits:
        with device.watching():
            act()
    else:
        expect_fault(device, act, "memory was dropped that send on link")


def test_a_tensor_is_dropped_while_a_stream_that_was_not_told_reads_it(
    device: CheckedDevice,
) -> None:
    def act() -> None:
        x = ones(device)
        made = device.record()
        with device.outbound():
            made.wait()
            x + 1

    expect_fault(device, act, "memory was dropped that aten::add on outbound")


def test_views_keep_their_memory(device: CheckedDevice) -> None:
    with device.watching():
        with device.inbound():
            view = ones(device)[1:]
            made = device.record()
        made.wait()
        device.hold(view)
        view + 1


def test_a_link_that_has_ended_uses_nothing(device: CheckedDevice) -> None:
    with device.watching():
        x = ones(device)
        device.clocks.learn(LINK, device.clocks.of(device.stream))
        device.use(LINK, "send", reads=[x])
        device.clocks.end(LINK)
        del x


# ---- the caller waits, and two places ----------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0, 0] > 0),
        lambda x: x.nonzero(),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: torch.zeros(SHAPE).copy_(x),
        lambda x: x.copy_(torch.zeros(SHAPE), non_blocking=True),
    ],
)
def test_what_makes_the_caller_wait(
    device: CheckedDevice, ask: Callable[[torch.Tensor], object]
) -> None:
    expect_fault(device, lambda: ask(ones(device)), "makes the caller wait for the device")


def test_host_tensors_do_not_meet_device_tensors(device: CheckedDevice) -> None:
    expect_fault(device, lambda: ones(device) + torch.ones(SHAPE), "takes tensors of the host's")


def test_an_index_list_is_a_host_tensor(device: CheckedDevice) -> None:
    expect_fault(device, lambda: ones(device)[[0, 2]], "takes tensors of the host's")


def test_numbers_go_with_anything(device: CheckedDevice) -> None:
    with device.watching():
        y = ones(device) * 2.5 + torch.tensor(1.0)
        host = torch.ones(SHAPE) * torch.tensor([2.0])
        assert bool((host == 2).all())
        del y


# ---- what is captured --------------------------------------------------


def test_a_replay_follows_its_static_buffers(device: CheckedDevice) -> None:
    with device.watching():
        x = ones(device)
        replay = device.capture(lambda: x * 2 + torch.zeros(SHAPE, device=device.torch_device))
        x.copy_(ones(device) * 3)
        assert [download(device, replay()).eq(6).all() for _ in range(2)] == [True, True]


def test_a_replay_returns_the_same_memory(device: CheckedDevice) -> None:
    with device.watching():
        x = ones(device)
        replay = device.capture(lambda: x + 1)
        assert replay().data_ptr() == replay().data_ptr()


def test_a_replay_spoils_what_another_returned(device: CheckedDevice) -> None:
    with device.watching():
        x = ones(device)
        first, second = (device.capture(lambda: x + 1) for _ in range(2))
        returned = first()
        second()
        assert download(device, returned).isnan().all()


def test_a_static_buffer_is_filled_beside_a_replay(device: CheckedDevice) -> None:
    def act() -> None:
        x, y = ones(device), ones(device)
        replay = device.capture(lambda: x + 1)
        made = device.record()
        replay()
        with device.inbound():
            made.wait()
            x.copy_(y)

    expect_fault(device, act, "aten::copy_ on inbound uses .* aten::add on compute")


def test_a_replay_is_sent_while_the_next_one_runs(device: CheckedDevice) -> None:
    def act() -> None:
        x = ones(device)
        replay = device.capture(lambda: x + 1)
        returned = replay()
        device.clocks.learn(LINK, device.clocks.of(device.stream))
        device.use(LINK, "send", reads=[returned])
        replay()

    expect_fault(device, act, "on compute uses .* send on link")


NOT_CAPTURED = {
    "a number": lambda plan: plan.x * plan.number,
    "a tensor that is another one": lambda plan: plan.x + plan.other,
    "a length": lambda plan: plan.x[: plan.number].sum(0),
    "what was kept of the first time": lambda plan: plan.x + plan.kept(),
}


class HostPlan:
    """What the host knows of a plan; the next one is another."""

    def __init__(self, device: CheckedDevice) -> None:
        self.x = ones(device)
        self.others = [ones(device), ones(device)]
        self.number = 1
        self.memo: list[torch.Tensor] = []

    @property
    def other(self) -> torch.Tensor:
        return self.others[self.number - 1]

    def kept(self) -> torch.Tensor:
        if not self.memo:
            self.memo.append(self.x * 2)
        return self.memo[0]


@pytest.mark.parametrize("name", NOT_CAPTURED)
def test_a_replay_does_not_see_the_hosts_variables(device: CheckedDevice, name: str) -> None:
    def act() -> None:
        plan = HostPlan(device)
        replay = device.capture(lambda: NOT_CAPTURED[name](plan))
        plan.number = 2
        replay()

    expect_fault(device, act, "a replay would not do what the work does now")


@pytest.mark.parametrize(
    "work",
    [lambda x: x + torch.tensor(1.0), lambda x: x * len(torch.ones(3).tolist())],
    ids=["a number in a tensor", "an operation of its own"],
)
def test_nothing_of_the_hosts_is_captured(
    device: CheckedDevice, work: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    def act() -> None:
        x = ones(device)
        device.capture(lambda: work(x))

    expect_fault(device, act, "would not see it change|is not captured")
