"""Queues of several tenants that take turns. Pure."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class TenantQueues(Generic[T]):
    """The items of each tenant in order of arrival. Tenants take turns: one that waits is behind at
    most one item of each other tenant."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[T]] = {}  # none is empty; the next turn is the first one's

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __iter__(self) -> Iterator[T]:
        return (item for queue in self._queues.values() for item in queue)

    def count(self, tenant: str) -> int:
        """Items of one tenant."""
        return len(self._queues.get(tenant, ()))

    def push(self, tenant: str, item: T) -> None:
        self._queues.setdefault(tenant, deque()).append(item)

    def pop(self, may_take: Callable[[str], bool]) -> T | None:
        """The next item of the first tenant in turn that may take one; None if there is none.
        O(tenants)."""
        tenant = next(filter(may_take, self._queues), None)
        if tenant is None:
            return None
        queue = self._queues.pop(tenant)
        item = queue.popleft()
        if queue:
            self._queues[tenant] = queue
        return item

    def clear(self) -> None:
        self._queues.clear()
