"""Recording what a call launches, to launch it again at once."""

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2  # kernels compile in the first; libraries set up what they need by the second


class Recorder(Protocol):
    """Records calls that read and write only memory that stays where it is."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Call `work`, once or more, and return what does the same again: all that it launched,
        on the same memory, without calling it."""

    def used_bytes(self) -> int:
        """Of the device's memory, by anybody."""


class CudaRecorder:
    """CUDA graphs. Never run on a GPU yet: written by PyTorch's documentation of them.

    All are recorded on one side stream into one pool of memory: what one of them needed while it
    ran, the next may use, as no two run at a time. What outlives a run is to lie elsewhere.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # no types
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        with torch.cuda.device(self._device):
            compute = torch.cuda.current_stream(self._device)
            self._stream.wait_stream(compute)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    work()
            compute.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # What other threads ask of the driver meanwhile is none of the recording's business.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
