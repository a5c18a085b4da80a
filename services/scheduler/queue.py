"""The waiting line: jobs kept sorted by the preset's order."""

from bisect import insort
from collections.abc import Callable, Iterator

from services.scheduler.jobs import Job
from services.scheduler.order import Key


class JobQueue:
    """Sorted by key at insertion: O(log n) to find the place, one memmove to take it."""

    def __init__(self, key: Callable[[Job], Key]):
        self._key = key
        self._jobs: list[Job] = []

    def push(self, job: Job) -> None:
        insort(self._jobs, job, key=self._key)

    def remove(self, job: Job) -> None:
        self._jobs.remove(job)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def head(self, count: int) -> list[Job]:
        return self._jobs[:count]
