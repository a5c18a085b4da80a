"""The threads and vector width available to Numba's kernels."""

from functools import cache

import numba
import torch
from llvmlite import binding


@cache
def numba_threads() -> int:
    """Numba's number of threads, whatever a thread's current setting. The first call starts them,
    with an OpenMP call that changes PyTorch's number of threads in this thread; it is restored."""
    threads = torch.get_num_threads()
    started: int = numba.get_num_threads()
    torch.set_num_threads(threads)
    return started


def wide_vectors() -> bool:
    """Whether a register holds sixteen float32 and there are 32 of them, as the tiles assume."""
    return bool(binding.get_host_cpu_features().get("avx512f"))
