"""BlockPool: who owns which block of the KV cache.

A block is `block_tokens` consecutive positions of one sequence, in every layer. Each block has
one owner or is free; nothing here touches the cache's memory.
"""

from collections import Counter


class BlockPool:
    """Hands out block numbers 0 … blocks-1. All operations are O(blocks moved)."""

    def __init__(self, blocks: int, block_tokens: int):
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))  # the last freed is the warmest in caches
        self._owned: dict[str, list[int]] = {}

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def free_tokens(self) -> int:
        return len(self._free) * self.block_tokens

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_tokens)

    def table(self, owner: str) -> list[int]:
        """The owner's blocks in order of position; the caller does not change it."""
        return self._owned.get(owner, [])

    def reach(self, owner: str) -> int:
        """Tokens that fit into what the owner has and what is free."""
        return (len(self.table(owner)) + len(self._free)) * self.block_tokens

    def grow(self, owner: str, tokens: int) -> bool:
        """Give `owner` room for `tokens` in all; False, with nothing changed, if memory is out."""
        table = self._owned.get(owner)
        missing = self.blocks_for(tokens) - (len(table) if table else 0)
        if missing > len(self._free):
            return False
        if missing > 0:
            if table is None:
                table = self._owned[owner] = []
            table.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, owner: str) -> None:
        """Take back all blocks of `owner`; nothing happens when it has none."""
        self._free.extend(reversed(self._owned.pop(owner, [])))

    def owners(self) -> list[str]:
        return list(self._owned)

    def check_integrity(self) -> None:
        """Every block is free or has exactly one owner. Raises AssertionError otherwise."""
        counts = Counter(self._free)
        for owner, table in self._owned.items():
            assert table, f"{owner} is listed with no blocks"
            counts.update(table)
        assert len(counts) == self.blocks, f"{self.blocks - len(counts)} blocks are lost"
        assert counts.total() == self.blocks, "a block has two owners"
        assert all(0 <= block < self.blocks for block in counts), "a block out of range"
