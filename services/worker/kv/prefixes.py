"""CachedPrefixes: hashes of the shareable blocks of a worker, reported as changes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from services.runtime.prefix import MAX_PREFIX_CHANGES, MAX_REPORTED_PREFIXES, hash_of


class StoredBlocks(NamedTuple):
    """Blocks of one text that have become shareable."""

    indexes: Sequence[int]  # ascending
    keys: Sequence[bytes]  # of the text's first blocks
    tokens: Sequence[int]  # of the text
    cache_salt: str
    adapter: str


class PrefixListener(Protocol):
    """Called when blocks become, and cease to be, shareable, by the engine's thread."""

    def stored(self, blocks: StoredBlocks) -> None: ...

    def removed(self, key: bytes) -> None: ...

    def cleared(self) -> None:
        """No block is shareable any more."""


class CachedPrefixes:
    """Published blocks of a pool, and which of them the scheduler has received.

    Reports nothing until `ask` sets how many blocks of each text are reported. Bounded by the
    pool: a hash is published, or was reported and is removed. Each change is O(1).
    """

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # hash of each published block → its index in its text
        self._report_blocks = 0
        self._added: dict[int, None] = {}  # not yet reported, in order of publication
        self._gone: dict[int, None] = {}  # reported, then removed; removal not yet reported
        self._reported = 0

    def ask(self, blocks: int) -> None:
        """Sets how many leading blocks of each text are reported. A change restarts the report
        from the beginning; 0 is the initial value for a new scheduler."""
        if blocks == self._report_blocks:
            return
        self._report_blocks = blocks
        self._added = {key: None for key, depth in self._depths.items() if depth < blocks}
        self._gone = {}
        self._reported = 0

    def add(self, key: bytes, depth: int) -> None:
        """Adds the published block `key`, the `depth`-th of its text, counted from 0."""
        name = hash_of(key)
        self._depths[name] = depth
        if name in self._gone:
            del self._gone[name]
        elif depth < self._report_blocks:
            self._added[name] = None

    def remove(self, key: bytes) -> None:
        """Removes a block that is no longer published."""
        name = hash_of(key)
        depth = self._depths.pop(name, self._report_blocks)
        if name in self._added:
            del self._added[name]
        elif depth < self._report_blocks:
            self._gone[name] = None

    def pop_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns hashes added and removed since the last call, at most MAX_PREFIX_CHANGES each.

        At most MAX_REPORTED_PREFIXES published blocks are known to the scheduler at a time."""
        gone = _pop_first(self._gone, MAX_PREFIX_CHANGES)
        self._reported -= len(gone)
        added = _pop_first(
            self._added, min(MAX_PREFIX_CHANGES, MAX_REPORTED_PREFIXES - self._reported)
        )
        self._reported += len(added)
        return added, gone

    def check_integrity(self, published: Iterable[bytes]) -> None:
        """Raises AssertionError unless hashes and report state match `published`."""
        assert set(self._depths) == {hash_of(key) for key in published}, (
            "hashes differ from the published keys"
        )
        assert set(self._added) <= set(self._depths), "an unreported block is not published"
        assert not set(self._gone) & set(self._depths), "a removed block is still published"
        asked = sum(depth < self._report_blocks for depth in self._depths.values())
        assert self._reported == asked - len(self._added) + len(self._gone), (
            "the count of reported blocks is wrong"
        )


def _pop_first(changes: dict[int, None], count: int) -> tuple[int, ...]:
    popped = tuple(name for name, _ in zip(changes, range(count), strict=False))
    for name in popped:
        del changes[name]
    return popped
