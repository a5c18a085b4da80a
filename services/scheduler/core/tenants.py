"""Tenants of live requests as numbers: names are known for as long as somebody has them."""

from collections.abc import Mapping
from heapq import heappop, heappush


class Tenants:
    """Numbers are dense, the least that is free is given next: there are never more of them than
    there were live requests at once. `weights` are what tenants count for; 1 for all others."""

    def __init__(self, weights: Mapping[str, float]):
        self._weights = weights
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []  # by number
        self._live: list[int] = []  # requests, by number
        self._free: list[int] = []

    def enter(self, name: str) -> tuple[int, float]:
        """One more request of this tenant; its number, and what it counts for. O(log tenants)."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._new(name)
        self._live[number] += 1
        return number, self._weights.get(name, 1.0)

    def leave(self, number: int) -> None:
        """One request less; with its last, the name is forgotten."""
        self._live[number] -= 1
        if not self._live[number]:
            del self._numbers[self._names[number]]
            self._names[number] = ""
            heappush(self._free, number)

    def _new(self, name: str) -> int:
        if self._free:
            number = heappop(self._free)
            self._names[number] = name
            return number
        self._names.append(name)
        self._live.append(0)
        return len(self._names) - 1

    def __len__(self) -> int:
        """Tenants that have a live request."""
        return len(self._numbers)
