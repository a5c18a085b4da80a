"""HostCache: host memory for offloaded blocks, one record per block."""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

# A power of two, because PyTorch rounds pinned memory up to one.
SLAB_BYTES = 64 * 2**20


class HostCache:
    """Room for up to `blocks` records of `record_bytes`, allocated in slabs as it is needed.

    If a slab exceeds `free_bytes()` or the system refuses it, the pool does not grow any more:
    another attempt at every step would stall decoding.
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
        self.refused = ""  # why the pool stopped growing; empty before
        self._free_bytes = free_bytes
        self._pinned = pinned
        self._slab_blocks = max(1, slab_bytes // record_bytes)
        self._slabs: list[Tensor] = []

    def ensure(self, blocks: int) -> bool:
        """Grows the pool to `blocks` if possible. Returns whether blocks 0 … blocks-1 exist.

        KV that does not fit is recomputed. Pinning a slab takes milliseconds; `require` allocates
        the whole pool at start.
        """
        while self.capacity < min(blocks, self.blocks) and not self.refused:
            self._grow()
        return blocks <= self.capacity

    def require(self) -> None:
        """Allocates the whole pool. Raises ValueError, which says what to change, on failure."""
        if not self.ensure(self.blocks):
            raise ValueError(
                f"the host pool needs {self.blocks * self.record_bytes / 2**30:.2f} GiB, but only "
                f"{self.capacity * self.record_bytes / 2**30:.2f} GiB could be allocated "
                f"({self.refused}): set host_gib lower"
            )

    def runs(self, blocks: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yields the runs of `blocks` that are contiguous in memory: index of the first block, and
        the run's records. O(len(blocks)).

        Raises IndexError for a block that does not exist.
        """
        if not blocks:
            return
        starts = (
            index
            for index, (last, block) in enumerate(pairwise(blocks), 1)
            if block != last + 1 or block % self._slab_blocks == 0
        )
        for first, end in pairwise([0, *starts, len(blocks)]):
            yield first, self._records(blocks[first], end - first)

    def _records(self, block: int, count: int) -> Tensor:
        if not 0 <= block <= self.capacity - count:
            raise IndexError(f"host block {block + count - 1} of {self.capacity} does not exist")
        slab, row = divmod(block, self._slab_blocks)
        return self._slabs[slab][row : row + count]

    def _grow(self) -> None:
        """Adds a slab, or sets `refused` to the reason for the failure."""
        wanted = min(self._slab_blocks, self.blocks - self.capacity)
        if wanted * self.record_bytes > self._free_bytes():
            # Linux overcommits: it would grant the memory and kill the process on use.
            self.refused = "no more host memory is free"
            return
        try:
            shape = (wanted, self.record_bytes)
            self._slabs.append(torch.empty(shape, dtype=torch.uint8, pin_memory=self._pinned))
        except RuntimeError as error:  # raised by PyTorch on exhausted memory, also on CUDA
            self.refused = str(error).partition("\n")[0] or type(error).__name__
        else:
            self.capacity += wanted
