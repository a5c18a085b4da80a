"""Records the launches of a call, and repeats them with one launch."""

from collections.abc import Callable
from typing import Protocol

import torch

WARM_UPS = 2  # the first compiles kernels; the second initialises libraries


class Recorder(Protocol):
    """Records calls that only use memory at fixed addresses."""

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        """Calls `work` at least once and returns a function that repeats its launches on the same
        memory."""

    def used_bytes(self) -> int:
        """Device memory in use by all processes."""


class CudaRecorder:
    """CUDA graphs, written from PyTorch's documentation and never run on a GPU.

    All graphs are recorded on one side stream into one memory pool: temporary memory of one graph
    is reused by the next, because no two run at a time. Results must live outside the pool.
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
            # Driver calls of other threads are not part of the recording.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                work()
        return graph.replay

    def used_bytes(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free
