"""A stage on one GPU. Compute goes to the default stream, which every thread starts with."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from orca_dist.device.seam import Event, Work


class CudaDevice:
    """The GPU `index` of those that this process sees, and two streams beside its default one.

    It is this thread's from now on; in other threads that is GPU 0, unless they set another.
    """

    is_host = False
    host_bytes = 0

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._inbound = torch.cuda.Stream(self.torch_device)
        self._outbound = torch.cuda.Stream(self.torch_device)
        self._capturing = torch.cuda.Stream(self.torch_device)  # the default one can't
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def free_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def inbound(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._inbound)

    def outbound(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._outbound)

    def record(self) -> Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def hold(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(torch.cuda.current_stream(self.torch_device))

    def pinned(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=True)

    def capture(self, work: Work) -> Work:
        """As a CUDA graph. Other threads may go on with the device: links do, and NCCL's own."""
        self._warm_up(work)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._capturing, capture_error_mode="thread_local"
        ):
            result = work()

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def _warm_up(self, work: Work) -> None:
        """Once as it is: what is compiled or set up at its first use can't be captured."""
        compute = torch.cuda.current_stream(self.torch_device)
        self._capturing.wait_stream(compute)
        with torch.cuda.stream(self._capturing):
            work()
        compute.wait_stream(self._capturing)
