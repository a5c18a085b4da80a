"""Prompts that wait to be read, the newest first."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class Newest(Generic[T]):
    """At most `most` items by their keys; the oldest goes for a new one, counted in `dropped`.

    The newest is taken first: its answer is the farthest from its end, so that it gains most.
    """

    def __init__(self, most: int):
        self.dropped = 0
        self._most = most
        self._items: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, key: str, item: T) -> None:
        """In place of what had the key before, as the newest."""
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._most:
            self._items.popitem(last=False)
            self.dropped += 1

    def pop(self, key: str) -> T | None:
        return self._items.pop(key, None)

    def take(self, most: int) -> list[T]:
        """Removes and returns so many at most."""
        return [self._items.popitem()[1] for _ in range(min(most, len(self._items)))]
