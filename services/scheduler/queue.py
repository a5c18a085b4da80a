"""The waiting line: jobs kept sorted by their rank."""

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from services.scheduler.jobs import Job, Key


def _key(job: Job) -> Key:
    return job.rank.key


class JobQueue:
    """Sorted at insertion: O(log n) to find a place, one memmove to take or leave it.

    A job's rank does not change while it is in here.
    """

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def push(self, job: Job) -> None:
        insort(self._jobs, job, key=_key)

    def remove(self, job: Job) -> None:
        at = bisect_left(self._jobs, _key(job), key=_key)
        if at == len(self._jobs) or self._jobs[at] is not job:
            raise ValueError(f"request {job.request_id} is not in the queue")
        del self._jobs[at]

    def replace(self, jobs: Iterable[Job]) -> None:
        """These instead, ranked anew."""
        self._jobs = sorted(jobs, key=_key)

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        return iter(self._jobs)

    def head(self, count: int) -> list[Job]:
        return self._jobs[:count]
