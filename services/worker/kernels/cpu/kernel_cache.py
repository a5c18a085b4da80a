"""Registry of the Numba kernels cached on disk: whether this process compiled or loaded them.

Does not import Numba, so that processes without Numba kernels can query it.
"""

from typing import Any, TypeVar

T = TypeVar("T")

_kernels: list[Any] = []  # Numba's dispatchers, which have no types


def cached(kernel: T) -> T:
    """Registers a kernel compiled with `cache=True`."""
    _kernels.append(kernel)
    return kernel


def kernel_source() -> str:
    """Returns "compiled" if any called kernel was not on disk, else "loaded"; empty if none was
    called."""
    stats = [kernel.stats for kernel in _kernels]
    if any(each.cache_misses for each in stats):
        return "compiled"
    return "loaded" if any(each.cache_hits for each in stats) else ""
