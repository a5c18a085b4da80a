"""Which blocks of this worker's cache can be shared, as its scheduler is told: hashes, and news."""

from collections.abc import Iterable

from services.runtime.prefix import MOST_NEWS, MOST_TOLD, hash_of


class CachedPrefixes:
    """What is published in a pool, and what of it a scheduler has heard.

    Nothing is told until it is asked for: `ask` says how many blocks of each text matter. Bounded
    by the pool: a hash is here, or was told to be and is gone. Each change is O(1).
    """

    def __init__(self) -> None:
        self._depths: dict[int, int] = {}  # all that is published, and how deep in its text
        self._asked_blocks = 0
        self._added: dict[int, None] = {}  # untold, in the order of coming
        self._gone: dict[int, None] = {}  # told before
        self._told = 0

    def ask(self, blocks: int) -> None:
        """A plan asks for the first `blocks` of each text. Asked anew, all is told anew; 0 is what
        a new scheduler has asked for so far."""
        if blocks == self._asked_blocks:
            return
        self._asked_blocks = blocks
        self._added = {key: None for key, depth in self._depths.items() if depth < blocks}
        self._gone = {}
        self._told = 0

    def add(self, key: bytes, depth: int) -> None:
        """The block of that key, the `depth`-th of its text from 0 on, can be shared."""
        name = hash_of(key)
        self._depths[name] = depth
        if name in self._gone:
            del self._gone[name]
        elif depth < self._asked_blocks:
            self._added[name] = None

    def remove(self, key: bytes) -> None:
        """It can't be any more."""
        name = hash_of(key)
        depth = self._depths.pop(name, self._asked_blocks)
        if name in self._added:
            del self._added[name]
        elif depth < self._asked_blocks:
            self._gone[name] = None

    def pop_changes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What came and what went since the last call, each at most MOST_NEWS; of what is here no
        more than MOST_TOLD is told at a time."""
        gone = _take(self._gone, MOST_NEWS)
        self._told -= len(gone)
        added = _take(self._added, min(MOST_NEWS, MOST_TOLD - self._told))
        self._told += len(added)
        return added, gone

    def check_integrity(self, published: Iterable[bytes]) -> None:
        """It is about what is published, and nothing is told twice. Raises AssertionError."""
        assert set(self._depths) == {hash_of(key) for key in published}, "not what is published"
        assert set(self._added) <= set(self._depths), "to be told, but not there"
        assert not set(self._gone) & set(self._depths), "to be told that it is gone, but there"
        asked = sum(depth < self._asked_blocks for depth in self._depths.values())
        assert self._told == asked - len(self._added) + len(self._gone), "a wrong count"


def _take(news: dict[int, None], most: int) -> tuple[int, ...]:
    taken = tuple(name for name, _ in zip(news, range(most), strict=False))
    for name in taken:
        del news[name]
    return taken
