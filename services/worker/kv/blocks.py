"""BlockPool: who holds which block of the KV cache, on the device or in host memory.

A block is `block_tokens` consecutive positions of one sequence, in every layer. It is in one of
three states: *free*; *held* by one owner or, once it is full and published, by several who share
it; or *cached*: held by nobody, its content still findable by its key, taken as if it were free
when no block is, the longest unused first. Only the end of a table that is not full is ever
written, and only full blocks are shared, so nothing is copied on write. Nothing here touches the
cache's memory.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from services.worker.kv.prefixes import CachedPrefixes


class BlockPool:
    """Hands out block numbers 0 … blocks-1. All operations are O(blocks moved)."""

    def __init__(self, blocks: int, block_tokens: int):
        self.blocks = blocks
        self.block_tokens = block_tokens
        self._free = list(range(blocks - 1, -1, -1))  # the last freed is the warmest in caches
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._tables: dict[str, list[int]] = {}
        self._holders = [0] * blocks
        self.shared_blocks = 0  # how often a block is held beyond its first holder, in all
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self.cached = CachedPrefixes()

    @property
    def free_blocks(self) -> int:
        """Blocks nobody holds."""
        return len(self._free) + len(self._cached)

    @property
    def blank_blocks(self) -> int:
        """Of these, the ones whose content nobody could find."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """And those whose content is found by its key."""
        return len(self._cached)

    @property
    def free_tokens(self) -> int:
        return self.free_blocks * self.block_tokens

    @property
    def usage(self) -> float:
        """Share of the blocks that somebody holds, 0 where there are none."""
        return 1 - self.free_blocks / self.blocks if self.blocks else 0.0

    def blocks_for(self, tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-tokens // self.block_tokens)

    def table(self, owner: str) -> list[int]:
        """The owner's blocks in order of position; the caller does not change it."""
        return self._tables.get(owner, [])

    def reach(self, owner: str) -> int:
        """Tokens that fit into what the owner has and what is free."""
        return (len(self.table(owner)) + self.free_blocks) * self.block_tokens

    @property
    def owner_count(self) -> int:
        """How many owners hold blocks: of any thread to ask, nothing is walked over."""
        return len(self._tables)

    def owners(self) -> list[str]:
        return list(self._tables)

    def held(self) -> dict[str, int]:
        """How many blocks each owner has, shared ones included. O(owners)."""
        return {owner: len(table) for owner, table in self._tables.items()}

    def grow(self, owner: str, tokens: int) -> bool:
        """Give `owner` room for `tokens` in all; False, with nothing changed, if memory is out."""
        table = self._tables.get(owner)
        missing = self.blocks_for(tokens) - (len(table) if table else 0)
        if missing > self.free_blocks:
            return False
        if missing > 0:
            if table is None:
                table = self._tables[owner] = []
            table.extend(self._take() for _ in range(missing))
        return True

    def release(self, owner: str) -> None:
        """Let go of all blocks of `owner`; nothing happens when it has none.

        The last block is let go first, so that the beginning of a text is found for longest.
        """
        for block in reversed(self._tables.pop(owner, [])):
            self._holders[block] -= 1
            if self._holders[block] == 0:
                self._let_go(block)
            else:
                self.shared_blocks -= 1

    def share(self, owner: str, keys: Sequence[bytes]) -> int:
        """Hold the published blocks of the longest prefix of `keys`; returns how many.

        Only for an owner that holds nothing yet.
        """
        assert owner not in self._tables, f"{owner} holds blocks already"
        shared = [self._by_key[key] for key in keys[: self.known(keys)]]
        for block in shared:
            self._cached.pop(block, None)
            self.shared_blocks += self._holders[block] > 0
            self._holders[block] += 1
        if shared:
            self._tables[owner] = shared
        return len(shared)

    def known(self, keys: Sequence[bytes]) -> int:
        """How many of the first of them are published."""
        return next((i for i, key in enumerate(keys) if key not in self._by_key), len(keys))

    def publish(self, owner: str, index: int, key: bytes) -> None:
        """Make the owner's block `index`, full and never written again, findable by `key`.

        Where another block has that key already, this one stays its owner's alone.
        """
        block = self._tables[owner][index]
        if key not in self._by_key and block not in self._keys:
            self._by_key[key] = block
            self._keys[block] = key
            self.cached.add(key, index)

    def unpublish_all(self) -> None:
        """Let nobody find anything any more; those who hold it keep it."""
        for key in self._by_key:
            self.cached.remove(key)
        self._by_key.clear()
        self._keys.clear()
        self._free.extend(self._cached)
        self._cached.clear()

    def _take(self) -> int:
        block = self._free.pop() if self._free else self._reuse()
        self._holders[block] = 1
        return block

    def _reuse(self) -> int:
        block, _ = self._cached.popitem(last=False)
        key = self._keys.pop(block)
        del self._by_key[key]
        self.cached.remove(key)
        return block

    def _let_go(self, block: int) -> None:
        if block in self._keys:
            self._cached[block] = None
        else:
            self._free.append(block)

    def check_integrity(self) -> None:
        """Every block is in one state and held as often as tables say. Raises AssertionError."""
        held = Counter(block for table in self._tables.values() for block in table)
        states = Counter([*self._free, *self._cached, *held])
        assert all(self._tables.values()), "an owner is listed with no blocks"
        assert sorted(states) == list(range(self.blocks)), "a block is lost or out of range"
        assert states.total() == self.blocks, "a block is in two states"
        assert all(self._holders[b] == held[b] for b in range(self.blocks)), "a wrong count"
        assert all(len(set(table)) == len(table) for table in self._tables.values())
        assert {b: k for k, b in self._by_key.items()} == self._keys, "keys disagree"
        assert set(self._cached) <= set(self._keys), "cached, but not to be found"
        self.cached.check_integrity(self._by_key)
        assert not set(self._free) & set(self._keys), "free, yet to be found"
        shared = {block for block, count in held.items() if count > 1}
        assert shared <= set(self._keys), "shared, but never published"
        in_use = sum(self.held().values()) - self.shared_blocks
        assert in_use + self.free_blocks == self.blocks, "the account of blocks is wrong"
