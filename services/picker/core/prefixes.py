"""Prefixes that an endpoint has probably cached: hashes of blocks of prompt texts. Pure."""

from collections.abc import Sequence


class CachedPrefixes:
    """At most `kept` blocks, the least recently used forgotten first."""

    def __init__(self, kept: int):
        self._kept = kept
        self._blocks: dict[int, None] = {}  # oldest use first

    def __len__(self) -> int:
        return len(self._blocks)

    def count_leading(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are here without a gap."""
        for count, block in enumerate(hashes):
            if block not in self._blocks:
                return count
        return len(hashes)

    def use(self, hashes: Sequence[int]) -> None:
        """A prompt with these blocks is computed. Its last block is forgotten first: the earlier
        ones are shared by more prompts."""
        for block in reversed(hashes):
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._kept:
            del self._blocks[next(iter(self._blocks))]
