"""What Numba's kernels may take of this machine."""

from functools import cache

import numba
import torch
from llvmlite import binding


@cache
def numba_threads() -> int:
    """How many Numba has, whatever a thread was told to take later. Asked first, it starts them, by
    an OpenMP call that PyTorch's number of threads in this thread follows: it is put back."""
    threads = torch.get_num_threads()
    started: int = numba.get_num_threads()
    torch.set_num_threads(threads)
    return started


def wide_vectors() -> bool:
    """Whether a register holds sixteen float32, and there are 32 of them, as tiles are cut for."""
    return bool(binding.get_host_cpu_features().get("avx512f"))
