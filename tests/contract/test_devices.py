"""One suite over every Device."""

from __future__ import annotations

import pytest
import torch

from orca_dist.stage.device import CpuDevice, CudaDevice, Device, make_device

NAMES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.int64, torch.float32, torch.bfloat16]


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> Device:
    return make_device(request.param)


def test_a_name_makes_its_device(device: Device) -> None:
    kind = {"cpu": CpuDevice, "cuda": CudaDevice}[device.torch_device.type]
    assert isinstance(device, kind)
    assert torch.zeros(1, device=device.torch_device).device == device.torch_device


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (257,), (3, 64), (0, 64)])
def test_what_is_uploaded_can_be_downloaded(
    device: Device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    host = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    there = device.upload(host)
    assert there.device == device.torch_device
    assert (there.dtype, there.shape) == (dtype, host.shape)
    back = device.download(there)
    assert back.device.type == "cpu"
    assert torch.equal(back, host)


def test_download_waits_for_the_work_before_it(device: Device) -> None:
    """A long chain of steps: what comes back is its end, not its beginning."""
    x = device.upload(torch.zeros(256, 256))
    for _ in range(500):
        x = x + 1
    assert device.download(x).eq(500).all()


def test_uploads_stay_in_order_with_the_work_around_them(device: Device) -> None:
    """A host tensor that is dropped at once after its upload arrives whole."""
    parts = [device.upload(torch.full((64, 64), float(i))) for i in range(50)]
    total = torch.stack(parts).sum(0)
    assert device.download(total).eq(sum(range(50))).all()


def test_parts_and_views_arrive(device: Device) -> None:
    """Not every host tensor is contiguous."""
    host = torch.arange(48.0).reshape(6, 8)
    for view in (host[1:3], host[:, 2:5], host.T):
        assert torch.equal(device.download(device.upload(view)), view)
