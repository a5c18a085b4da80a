"""A bounded queue by key that evicts the oldest item and serves the newest first."""

from collections import OrderedDict
from typing import Generic, TypeVar

T = TypeVar("T")


class NewestFirstQueue(Generic[T]):
    """Holds at most `limit` items. A new item evicts the oldest one, counted in `dropped`."""

    def __init__(self, limit: int):
        self.dropped = 0
        self._limit = limit
        self._items: OrderedDict[str, T] = OrderedDict()

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: str) -> T | None:
        return self._items.get(key)

    def put(self, key: str, item: T) -> None:
        """Inserts or replaces an item as the newest."""
        self._items[key] = item
        self._items.move_to_end(key)
        if len(self._items) > self._limit:
            self._items.popitem(last=False)
            self.dropped += 1

    def amend(self, key: str, item: T) -> None:
        """Replaces an existing item and keeps its age."""
        if key in self._items:
            self._items[key] = item

    def pop(self, key: str) -> T | None:
        return self._items.pop(key, None)

    def pop_newest(self, limit: int) -> list[T]:
        """Removes and returns at most `limit` items, newest first."""
        return [self._items.popitem()[1] for _ in range(min(limit, len(self._items)))]
