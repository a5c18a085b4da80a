"""HostCache: the host memory that blocks rest in, one record a block."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# PyTorch rounds pinned memory up to a power of two, so a slab is one.
SLAB_BYTES = 64 * 2**20


class HostMemoryError(ValueError):
    """Host memory that was asked for at start is not to be had; the message says what to change."""


def host_blocks(kv_host_bytes: int, record_bytes: int, free_bytes: int) -> int:
    """How many blocks a host pool of that size takes. Raises HostMemoryError if it can't be."""
    if kv_host_bytes > free_bytes:
        raise HostMemoryError(
            f"the host pool of {kv_host_bytes / 2**30:.2f} GiB is larger than the "
            f"{free_bytes / 2**30:.2f} GiB of host memory that are free: make it smaller"
        )
    if 0 < kv_host_bytes < record_bytes:
        raise HostMemoryError(
            f"the host pool of {kv_host_bytes} bytes holds not even one block of "
            f"{record_bytes} bytes: make it larger, or 0 for none"
        )
    return kv_host_bytes // record_bytes


class HostCache:
    """Room for up to `blocks` records of `record_bytes`, allocated in slabs as it is needed.

    A slab that `free_bytes` has no room for, or the system refuses, is not made: the pool stays
    as large as it is for good, since asking at every step would stall decoding each time.
    """

    def __init__(
        self,
        blocks: int,
        record_bytes: int,
        free_bytes: Callable[[], int],
        pinned: bool = False,
        slab_bytes: int = SLAB_BYTES,
    ):
        self.blocks = blocks
        self.record_bytes = record_bytes
        self.capacity = 0  # blocks that exist
        self.refused = ""  # why there are no more, once that is so
        self._free_bytes = free_bytes
        self._pinned = pinned
        self._slab_blocks = max(1, slab_bytes // record_bytes)
        self._slabs: list[Tensor] = []

    def ensure(self, blocks: int) -> bool:
        """Whether blocks 0 … blocks-1 exist, now that it was tried.

        False is an answer, not an error: what doesn't fit is recomputed. Pinning a slab takes
        milliseconds; where they matter, `require` has all of it made at start.
        """
        while self.capacity < min(blocks, self.blocks) and not self.refused:
            self._grow()
        return blocks <= self.capacity

    def require(self) -> None:
        """Make all of it now. Raises HostMemoryError where that fails."""
        if not self.ensure(self.blocks):
            raise HostMemoryError(
                f"the host pool should have {self.blocks * self.record_bytes / 2**30:.2f} GiB, "
                f"but the system gave {self.capacity * self.record_bytes / 2**30:.2f} GiB "
                f"({self.refused}): make it smaller"
            )

    def runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """`blocks`, cut where the next is not the one behind it in memory: the position of each
        run's first block, and the run's records, contiguous. O(len(blocks)).

        Raises IndexError for a block that does not exist.
        """
        if not blocks:
            return
        cuts = [0, *(i for i in range(1, len(blocks)) if self._apart(blocks, i)), len(blocks)]
        for first, end in pairwise(cuts):
            yield first, self._records(blocks[first], end - first)

    def _apart(self, blocks: Sequence[int], i: int) -> bool:
        return blocks[i] != blocks[i - 1] + 1 or blocks[i] % self._slab_blocks == 0

    def _records(self, block: int, count: int) -> Tensor:
        if not 0 <= block <= self.capacity - count:
            raise IndexError(f"host block {block + count - 1} of {self.capacity} does not exist")
        slab, row = divmod(block, self._slab_blocks)
        return self._slabs[slab][row : row + count]

    def _grow(self) -> None:
        """One slab more, or the reason why not in `refused`."""
        wanted = min(self._slab_blocks, self.blocks - self.capacity)
        if wanted * self.record_bytes > self._free_bytes():
            # Linux would promise the memory all the same, and kill the process once it is used.
            self.refused = "no more host memory is free"
            return
        try:
            shape = (wanted, self.record_bytes)
            self._slabs.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned))
        except RuntimeError as error:  # PyTorch's, on CUDA too, when memory is out
            self.refused = str(error).partition("\n")[0] or type(error).__name__
        else:
            self.capacity += wanted
