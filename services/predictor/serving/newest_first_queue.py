"""What waits by its key, no more than so much: the oldest goes, the newest is taken first."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Newest(Generic[T]):
    """At most `most` items; the oldest goes for a new one, counted in `dropped`."""

    def __init__(self, most: int):
        self.dropped = 0
        self._most = most
        self._items: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: str) -> T | None:
        return self._items.get(key)

    def put(self, key: str, item: T) -> None:
        """In place of what had the key before, as the newest."""
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._most:
            self._items.popitem(last=False)
            self.dropped += 1

    def amend(self, key: str, item: T) -> None:
        """In place of what has the key, if anything has: it is as old as that was."""
        if key in self._items:
            self._items[key] = item

    def pop(self, key: str) -> T | None:
        return self._items.pop(key, None)

    def take(self, most: int) -> list[T]:
        """Removes and returns so many at most, the newest first."""
        return [self._items.popitem()[1] for _ in range(min(most, len(self._items)))]
