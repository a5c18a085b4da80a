"""The workers of a large fleet take turns: each round decides about a few of them.

A decision about each of 64 workers takes tens of milliseconds, and few of them have changed since
the last one. So a round decides about MOST_WORKERS. Those with news of their own, such as a report,
come first, in the order of their news. A change of the queue concerns every worker: of the other
places, half are given to the workers with the most free memory, where a new request starts soonest,
and half to those that have been due for longest, so that each worker has its turn.

The order of requests always considers the whole fleet.
"""

from collections.abc import Callable, Iterable
from heapq import nlargest

from services.policies.snapshot import WorkerSnapshot

MOST_WORKERS = 8  # that a round decides about
KEPT_SHARE = 0.25  # of these places, for workers without news


class Turns:
    """The workers that are due, by their numbers: something has changed since a round decided about
    them. A round decides about `most` workers, a whole number or infinite."""

    def __init__(self, most: float = MOST_WORKERS):
        self.most = most
        self._own: dict[int, None] = {}  # workers with news, in order
        self._others: dict[int, None] = {}  # that the changed queue concerns, in order
        self._queue_changed = False  # the others are all workers again

    @property
    def pending(self) -> bool:
        """Whether there is anything to decide."""
        return self._queue_changed or bool(self._own or self._others)

    def note(self, number: int) -> None:
        """A worker has news."""
        self._own[number] = None

    def note_all(self) -> None:
        """Something changed that may concern every worker."""
        self._queue_changed = True

    def forget_queue(self) -> None:
        """A round has left no request waiting. What has changed since it began stays."""
        self._others.clear()

    def clear(self) -> None:
        """A round decides about every worker."""
        self._queue_changed = False
        self._others.clear()
        self._own.clear()

    def take(
        self, workers: tuple[WorkerSnapshot, ...], free: Callable[[int], float]
    ) -> tuple[WorkerSnapshot, ...]:
        """The workers that the next round decides about: all of a small fleet. `free` is the free
        share of a worker's memory. O(workers log MOST_WORKERS)."""
        if len(workers) <= self.most:
            self.clear()
            return workers
        numbers = {worker.number: None for worker in workers}
        own = _known(self._own, numbers)
        self._others = _known(self._others, numbers)
        if self._queue_changed or not (own or self._others):
            self._others |= numbers
            self._queue_changed = False
        most = int(self.most)
        others = [number for number in self._others if number not in own]
        turn = list(own)[: most - min(int(most * KEPT_SHARE), len(others))]
        freest = nlargest((most - len(turn) + 1) // 2, others, free)
        turn += freest
        turn += [number for number in others if number not in freest][: most - len(turn)]
        for number in turn:
            own.pop(number, None)
            self._others.pop(number, None)
        self._own = own
        return tuple(worker for worker in workers if worker.number in turn)


def _known(numbers: Iterable[int], workers: dict[int, None]) -> dict[int, None]:
    return {number: None for number in numbers if number in workers}
