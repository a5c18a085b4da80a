"""A dictionary that evicts its oldest entry when it is full."""

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class BoundedDict(dict[K, V]):
    """Holds at most `max_entries`, in order of insertion. Replacing a value keeps the position of
    the entry; to make it the newest, pop and insert it."""

    def __init__(self, max_entries: int):
        super().__init__()
        self._max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        if len(self) > self._max_entries:
            del self[next(iter(self))]
