"""Numbers for the tenants of live requests."""

from collections.abc import Mapping
from heapq import heappop, heappush

Tenant = tuple[str, float]  # its name, and its own weight or 0
NONE: Tenant = ("", 0.0)


class Tenants:
    """Assigns dense numbers: the lowest free number first, so there are never more numbers than
    requests were live at once. `weights` maps a tenant to its share; the default is 1.

    A tenant is a name with a weight of its own, if it has one: a client that names the tenant of a
    weighted API key takes nothing of its share.
    """

    def __init__(self, weights: Mapping[str, float]):
        self._weights = weights
        self._numbers: dict[Tenant, int] = {}
        self._tenants: list[Tenant] = []  # by number
        self._live: list[int] = []  # requests, by number
        self._free: list[int] = []

    def enter(self, name: str, weight: float = 0.0) -> tuple[int, float]:
        """Counts one more request of this tenant; returns its number and weight. `weight`: its own;
        0: none. O(log tenants)."""
        tenant = (name, weight)
        number = self._numbers.get(tenant)
        if number is None:
            number = self._numbers[tenant] = self._allocate(tenant)
        self._live[number] += 1
        return number, weight or self._weights.get(name, 1.0)

    def leave(self, number: int) -> None:
        """Counts one request less. The last one frees the number."""
        self._live[number] -= 1
        if not self._live[number]:
            del self._numbers[self._tenants[number]]
            self._tenants[number] = NONE
            heappush(self._free, number)

    def _allocate(self, tenant: Tenant) -> int:
        if self._free:
            number = heappop(self._free)
            self._tenants[number] = tenant
            return number
        self._tenants.append(tenant)
        self._live.append(0)
        return len(self._tenants) - 1

    def __len__(self) -> int:
        """Tenants with a live request."""
        return len(self._numbers)
