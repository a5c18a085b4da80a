"""Numbers for the tenants of live requests."""

from collections.abc import Mapping
from heapq import heappop, heappush


class Tenants:
    """Assigns dense numbers: the lowest free number first, so there are never more numbers than
    requests were live at once. `weights` maps a tenant to its share; the default is 1."""

    def __init__(self, weights: Mapping[str, float]):
        self._weights = weights
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []  # by number
        self._live: list[int] = []  # requests, by number
        self._free: list[int] = []

    def enter(self, name: str) -> tuple[int, float]:
        """Counts one more request of this tenant; returns its number and weight. O(log tenants)."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = self._allocate(name)
        self._live[number] += 1
        return number, self._weights.get(name, 1.0)

    def leave(self, number: int) -> None:
        """Counts one request less. The last one frees the number."""
        self._live[number] -= 1
        if not self._live[number]:
            del self._numbers[self._names[number]]
            self._names[number] = ""
            heappush(self._free, number)

    def _allocate(self, name: str) -> int:
        if self._free:
            number = heappop(self._free)
            self._names[number] = name
            return number
        self._names.append(name)
        self._live.append(0)
        return len(self._names) - 1

    def __len__(self) -> int:
        """Tenants with a live request."""
        return len(self._numbers)
