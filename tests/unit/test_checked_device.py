"""The checked device itself: each kind of fault is one, and what is in order is none."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from orca_dist.device.checked import CheckedDevice, OrderFault

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
