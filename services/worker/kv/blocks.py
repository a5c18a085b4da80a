"""BlockPool: ownership of the KV cache blocks of one pool, on the device or in host memory.

A block is `block_tokens` consecutive positions of one sequence, in every layer. It is in one of
three states: *free*; *held* by one owner or, once it is full and published, shared by several
owners; or *cached*: without an owner, its content still found by its key. Cached blocks are reused
in LRU order when no block is free. Only the last, partly filled block of a table is written, and
only full blocks are shared, so there is no copy-on-write. This module never accesses the cache's
memory.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence

from services.worker.kv.prefixes import CachedPrefixes, PrefixListener


class BlockPool:
    """Allocates blocks 0 … blocks-1. All operations are O(blocks changed)."""

    def __init__(self, blocks: int, block_tokens: int, listener: PrefixListener | None = None):
        self.blocks = blocks
        self.block_tokens = block_tokens
        # LIFO: the last freed block is the most likely one to be in a CPU cache.
        self._free = list(range(blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._tables: dict[str, list[int]] = {}
        self._holders = [0] * blocks
        self.shared_blocks = 0  # references beyond the first, summed over all blocks
        self._by_key: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self.cached = CachedPrefixes()
        self.listener = listener

    @property
    def free_blocks(self) -> int:
        """Blocks without an owner, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def blank_blocks(self) -> int:
        """Free blocks without published content."""
        return len(self._free)

    @property
    def cached_blocks(self) -> int:
        """Free blocks with content that is still found by its key."""
        return len(self._cached)

    @property
    def usage(self) -> float:
        """Fraction of the blocks that have an owner; 0 for an empty pool."""
        return 1 - self.free_blocks / self.blocks if self.blocks else 0.0

    def blocks_for(self, tokens: int) -> int:
        """Returns the number of blocks that hold `tokens`."""
        return -(-tokens // self.block_tokens)

    def table(self, owner: str) -> list[int]:
        """Returns the owner's blocks in order of position. Callers must not modify the list."""
        return self._tables.get(owner, [])

    def reach(self, owner: str) -> int:
        """Returns how many tokens fit into the owner's blocks plus all free blocks."""
        return (len(self.table(owner)) + self.free_blocks) * self.block_tokens

    @property
    def owner_count(self) -> int:
        """Number of owners. Any thread may read it."""
        return len(self._tables)

    def owners(self) -> list[str]:
        return list(self._tables)

    def held(self) -> dict[str, int]:
        """Returns the number of blocks of each owner, including shared ones. O(owners)."""
        return {owner: len(table) for owner, table in self._tables.items()}

    def grow(self, owner: str, tokens: int) -> bool:
        """Extends the owner's table to `tokens`. Returns False, unchanged, if blocks are short."""
        table = self._tables.get(owner)
        missing = self.blocks_for(tokens) - (len(table) if table else 0)
        if missing > self.free_blocks:
            return False
        if missing > 0:
            if table is None:
                table = self._tables[owner] = []
            self._allocate(table, missing)
        return True

    def release(self, owner: str) -> None:
        """Releases all blocks of `owner`, if it has any.

        Releases the last block first, so that the beginning of a text stays cached longest.
        """
        holders, keys, free = self._holders, self._keys, self._free
        for block in reversed(self._tables.pop(owner, [])):
            holders[block] -= 1
            if holders[block]:
                self.shared_blocks -= 1
            elif block in keys:
                self._cached[block] = None
            else:
                free.append(block)

    def trim(self, owner: str, tokens: int) -> None:
        """Releases the owner's last blocks, which must not be published, down to those for
        `tokens`, at least one."""
        table = self._tables.get(owner, [])
        for _ in range(len(table) - self.blocks_for(tokens)):
            block = table.pop()
            self._holders[block] = 0
            self._free.append(block)

    def share(self, owner: str, keys: Sequence[bytes]) -> int:
        """Gives `owner` the published blocks of the longest prefix of `keys`. Returns their number.

        The owner must hold no blocks yet.
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
        """Returns the length of the longest prefix of `keys` with published blocks only."""
        return next((i for i, key in enumerate(keys) if key not in self._by_key), len(keys))

    def publish(self, owner: str, index: int, key: bytes) -> bool:
        """Registers the owner's block `index`, which must be full, under `key`.

        If the key is already registered to another block, this one stays private to its owner:
        returns False.
        """
        block = self._tables[owner][index]
        if key in self._by_key or block in self._keys:
            return False
        self._by_key[key] = block
        self._keys[block] = key
        self.cached.add(key, index)
        return True

    def unpublish_all(self) -> None:
        """Removes all keys. Owners keep their blocks."""
        for key in self._by_key:
            self.cached.remove(key)
        self._by_key.clear()
        self._keys.clear()
        self._free.extend(self._cached)
        self._cached.clear()
        if self.listener:
            self.listener.cleared()

    def _allocate(self, table: list[int], count: int) -> None:
        """Extends a table by blocks without content, then by the least recently used cached
        ones."""
        free, holders, first = self._free, self._holders, len(table)
        if blank := min(count, len(free)):
            table += free[: -blank - 1 : -1]  # the last freed first
            del free[-blank:]
        for _ in range(count - blank):
            block, _ = self._cached.popitem(last=False)
            key = self._keys.pop(block)
            del self._by_key[key]
            self.cached.remove(key)
            if self.listener:
                self.listener.removed(key)
            table.append(block)
        for block in table[first:]:
            holders[block] = 1

    def check_integrity(self) -> None:
        """Raises AssertionError unless block states and reference counts match."""
        held = Counter(block for table in self._tables.values() for block in table)
        states = Counter([*self._free, *self._cached, *held])
        assert all(self._tables.values()), "an owner has no blocks"
        assert sorted(states) == list(range(self.blocks)), "a block is lost or out of range"
        assert states.total() == self.blocks, "a block is in two states"
        assert all(self._holders[b] == held[b] for b in range(self.blocks)), (
            "a reference count is wrong"
        )
        assert all(len(set(table)) == len(table) for table in self._tables.values())
        assert {b: k for k, b in self._by_key.items()} == self._keys, "keys disagree"
        assert set(self._cached) <= set(self._keys), "a cached block has no key"
        self.cached.check_integrity(self._by_key)
        assert not set(self._free) & set(self._keys), "a free block has a key"
        shared = {block for block, count in held.items() if count > 1}
        assert shared <= set(self._keys), "a shared block is not published"
        in_use = sum(self.held().values()) - self.shared_blocks
        assert in_use + self.free_blocks == self.blocks, (
            "the number of used and free blocks is wrong"
        )
