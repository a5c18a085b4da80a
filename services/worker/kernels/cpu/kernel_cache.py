"""The kernels that Numba keeps on disk from one start to the next, and how they came about here.

No Numba is imported here: a process may ask that has no use for it.
"""

from typing import Any, TypeVar

T = TypeVar("T")

_kernels: list[Any] = []  # Numba's dispatchers, which have no types


def cached(kernel: T) -> T:
    """Marks one that is compiled with `cache=True`."""
    _kernels.append(kernel)
    return kernel


def kernel_source() -> str:
    """Of all that this process has called: "compiled" where any was not on disk, else "loaded";
    empty where none was called."""
    stats = [kernel.stats for kernel in _kernels]
    if any(each.cache_misses for each in stats):
        return "compiled"
    return "loaded" if any(each.cache_hits for each in stats) else ""
