"""The threads and vector width available to Numba's kernels."""

from functools import cache

import numba
import torch
from llvmlite import binding


@cache
def numba_threads() -> int:
    """The number of threads that Numba starts. The first call starts them, which changes PyTorch's
    number of threads in this thread through OpenMP; that number is restored."""
    threads = torch.get_num_threads()
    started: int = numba.get_num_threads()
    torch.set_num_threads(threads)
    return started


def wide_vectors() -> bool:
    """Whether the processor has 32 registers of sixteen float32 each, which the tiles need."""
    return bool(binding.get_host_cpu_features().get("avx512f"))
