"""Who comes first, of those that wait and those that run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Protocol

from services.scheduler import alise
from services.scheduler.jobs import Job, Rank
from services.scheduler.pace import Pace, remaining_s
from services.scheduler.parameters import Param


class Ordering(Protocol):
    """An order gives every job its Rank and renews it as things happen. Changes no job."""

    def begin(self, job: Job, pace: Pace, now: float) -> Rank:
        """The first one, its forecast having come."""
        ...

    def renew(self, job: Job, pace: Pace) -> Rank:
        """After progress, a preemption, or at another pace."""
        ...

    def wait(self, job: Job, now: float) -> Rank:
        """It waits from now on."""
        ...

    def promotion_s(self, rank: Rank) -> float:
        """When waiting alone moves it up next; infinite if never."""
        ...

    def front_s(self, rank: Rank, now: float) -> float:
        """Seconds until waiting alone has brought it to the front."""
        ...

    def promote(self, job: Job, pace: Pace, now: float) -> Rank:
        """The rank it has waited for."""
        ...


@dataclass(frozen=True, slots=True)
class Arrival:
    """First come, first served; the evicted in front (ALGORITHMS 1, "when memory runs out")."""

    def begin(self, job: Job, pace: Pace, now: float) -> Rank:
        return self.renew(job, pace)

    def renew(self, job: Job, pace: Pace) -> Rank:
        key = (0.0 if job.preemptions else 1.0, job.request.arrival_s, job.serial)
        return Rank(key, remaining_s=remaining_s(job, pace, job.mean_remaining))

    def wait(self, job: Job, now: float) -> Rank:
        return job.rank

    def promotion_s(self, rank: Rank) -> float:
        return inf

    def front_s(self, rank: Rank, now: float) -> float:
        return inf

    def promote(self, job: Job, pace: Pace, now: float) -> Rank:
        return job.rank


ORDERS: dict[str, Callable[[Mapping[str, float]], Ordering]] = {
    "arrival": lambda _: Arrival(),
    "alise": alise.Alise.of,
}
PARAMS: dict[str, dict[str, Param]] = {"arrival": {}, "alise": alise.PARAMS}
