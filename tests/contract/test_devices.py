"""One suite over every Device: streams, events, and tables on their way to and fro."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from orca_dist.device.checked import CheckedDevice
from orca_dist.device.cpu import CpuDevice
from orca_dist.device.cuda import CudaDevice
from orca_dist.device.seam import Device
from orca_dist.device.staging import Uploads, download
from orca_dist.errors import ConfigError
from orca_dist.stage.device import make_device

NAMES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [*NAMES, "checked"]
DTYPES = [torch.int64, torch.float32, torch.bfloat16]


@pytest.fixture(params=KINDS)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    if request.param != "checked":
        yield make_device(request.param)
        return
    checked = CheckedDevice()
    with checked.watching():
        yield checked


@pytest.mark.parametrize("name", NAMES)
def test_a_name_makes_its_device(name: str) -> None:
    device = make_device(name)
    assert isinstance(device, {"cpu": CpuDevice, "cuda": CudaDevice}[name])
    assert torch.zeros(1, device=device.torch_device).device == device.torch_device


def test_nobody_can_ask_for_the_checked_one() -> None:
    with pytest.raises(ConfigError):
        make_device("checked")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (257,), (3, 64), (0, 64)])
def test_what_is_on_the_device_can_be_downloaded(
    device: Device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    num = torch.Size(shape).numel()
    there = torch.arange(num, dtype=dtype, device=device.torch_device).reshape(shape)
    back = download(device, there)
    assert back.device.type == "cpu"
    assert torch.equal(back, torch.arange(num, dtype=dtype).reshape(shape))


def test_download_waits_for_the_work_before_it(device: Device) -> None:
    """A long chain of steps: what comes back is its end, not its beginning."""
    x = torch.zeros(256, 256, device=device.torch_device)
    for _ in range(500):
        x = x + 1
    assert download(device, x).eq(500).all()


def test_the_tables_of_a_batch_arrive_each_for_itself(device: Device) -> None:
    host = [torch.arange(5), torch.arange(0), torch.arange(100, 117), torch.arange(6)[1:4]]
    sent = Uploads(device, num_buffers=2).send(host)
    sent.wait()
    for table, wanted in zip(sent.tables, host, strict=True):
        assert torch.equal(download(device, table), wanted)


def test_buffers_are_filled_again_only_once_they_have_been_read(device: Device) -> None:
    """Many times round the ring, with tables of all sizes, beside other work."""
    uploads = Uploads(device, num_buffers=2)
    other = torch.zeros(512, 512, device=device.torch_device)
    sent = []
    for i in range(50):
        sent.append(uploads.send([torch.full((1 + 37 * i % 1000,), i)]))
        other = other @ other
    for i, each in enumerate(sent):
        each.wait()
        assert download(device, each.tables[0]).eq(i).all()


def test_one_stream_waits_for_an_event_of_another(device: Device) -> None:
    x = torch.zeros(512, 512, device=device.torch_device)
    for _ in range(300):
        x = x + 1
    computed = device.record()
    host = device.pinned(x.shape, x.dtype)
    with device.outbound():
        computed.wait()
        host.copy_(x, non_blocking=True)
        device.hold(x)
        copied = device.record()
    del x
    churn = [torch.full((512, 512), -1.0, device=device.torch_device) for _ in range(4)]
    copied.synchronize()
    assert host.eq(300).all()
    assert len(churn) == 4


def test_what_arrives_beside_the_computation_is_there_when_it_is_waited_for(device: Device) -> None:
    host = device.pinned(torch.Size([1 << 20]), torch.int64).copy_(torch.arange(1 << 20))
    with device.inbound():
        there = torch.empty(1 << 20, dtype=torch.int64, device=device.torch_device)
        there.copy_(host, non_blocking=True)
        copied = device.record()
    copied.wait()
    device.hold(there)
    assert download(device, there + 1).eq(torch.arange(1, (1 << 20) + 1)).all()


# ---- what is captured --------------------------------------------------


def test_what_is_captured_follows_what_it_reads(device: Device) -> None:
    x, y = (torch.zeros(64, 64, device=device.torch_device) for _ in range(2))
    replay = device.capture(lambda: y.copy_(x + 1) * 2)
    for value in (3.0, 5.0):
        x.fill_(value)
        returned = replay().clone()
        assert download(device, returned).eq(2 * value + 2).all()
        assert download(device, y).eq(value + 1).all()


def test_several_that_are_captured_share_their_memory_and_run_in_any_order(device: Device) -> None:
    x = torch.zeros(128, device=device.torch_device)
    replays = []
    for factor in (2, 3, 5):
        replays.append(device.capture(lambda factor=factor: (x * factor).view(8, 16).sum(0) + 1))
    for number, index in enumerate([2, 0, 1, 1, 0, 2]):
        x.fill_(number)
        kept = replays[index]().clone()
        replays[index - 1]()
        assert download(device, kept).eq(8 * number * (2, 3, 5)[index] + 1).all()


def test_what_is_captured_comes_behind_what_the_stream_was_given(device: Device) -> None:
    x, y = (torch.zeros(512, 512, device=device.torch_device) for _ in range(2))
    replay = device.capture(lambda: y + 1)
    for _ in range(300):
        x = x + 1
    y.copy_(x)
    returned = replay().clone()
    y.fill_(-1)
    assert download(device, returned).eq(301).all()
