"""ALISE's priority queues: shortest remaining time first, with ageing and demotion.

papers/001 §3.1, "Preemptive Scheduling". Level i holds what still takes at most base·2^i seconds,
the last level all the rest; within a level the shorter goes first. Who has waited `ageing_s` at
its level moves up one, and from level 0 to the FRONT, where who came first goes first and nobody
is preempted: there starvation ends. Who outlives its promised length L̂ has L̂ doubled and moves
down one from where that puts it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, inf, log2

from services.scheduler.jobs import Job, Rank
from services.scheduler.pace import Pace, remaining_s
from services.scheduler.parameters import Param

FRONT = -1

PARAMS = {
    "levels": Param(8, 1, 32),
    "base_s": Param(0.02, 1e-6, 1e6),
    "ageing_s": Param(10.0, 1e-3, 1e6),
}


@dataclass(frozen=True, slots=True)
class Alise:
    """The order with its parameters. Ranks are values: each method gives the job's next one."""

    levels: int
    base_s: float
    ageing_s: float

    @staticmethod
    def of(params: Mapping[str, float]) -> "Alise":
        return Alise(int(params["levels"]), params["base_s"], params["ageing_s"])

    def level_of(self, remaining_s: float) -> int:
        """The queue that a remaining time belongs to."""
        if remaining_s <= self.base_s:
            return 0
        return min(self.levels - 1, ceil(log2(remaining_s / self.base_s)))

    def begin(self, job: Job, pace: Pace, now: float) -> Rank:
        """L̂ is the forecast's mean, given what is there already."""
        promised = min(job.request.max_tokens, job.output_tokens + job.mean_remaining)
        return self._ranked(job, pace, Rank((), promised_tokens=promised, since_s=now))

    def renew(self, job: Job, pace: Pace) -> Rank:
        """After progress, or at another pace; doubles L̂ as often as it was outlived."""
        rank = job.rank
        while rank.promised_tokens <= job.output_tokens and self._may_double(job, rank):
            rank = self._demoted(job, pace, rank)
        return self._ranked(job, pace, rank)

    def wait(self, job: Job, now: float) -> Rank:
        """It waits from now on."""
        return replace(job.rank, since_s=now)

    def promotion_s(self, rank: Rank) -> float:
        """When a job that waits with this rank moves up next; never from the FRONT."""
        return rank.since_s + self.ageing_s if rank.level > FRONT else inf

    def front_s(self, rank: Rank, now: float) -> float:
        """Seconds until ageing alone has brought it to the FRONT."""
        return max(0.0, rank.since_s + self.ageing_s * (rank.level - FRONT) - now)

    def promote(self, job: Job, pace: Pace, now: float) -> Rank:
        """Up one, where its clock starts anew."""
        rank = job.rank
        shift = rank.level - 1 - self.level_of(rank.remaining_s)
        return self._ranked(job, pace, replace(rank, shift=shift, since_s=now))

    def _may_double(self, job: Job, rank: Rank) -> bool:
        return rank.promised_tokens < job.request.max_tokens

    def _demoted(self, job: Job, pace: Pace, rank: Rank) -> Rank:
        """From the FRONT too: it is not kept there for what it did not promise."""
        promised = min(job.request.max_tokens, 2 * rank.promised_tokens)
        left_s = remaining_s(job, pace, promised - job.output_tokens)
        shift = max(rank.shift, rank.level - self.level_of(left_s)) + 1
        return self._ranked(
            job, pace, replace(rank, promised_tokens=promised, shift=shift, level=0)
        )

    def _ranked(self, job: Job, pace: Pace, rank: Rank) -> Rank:
        """What is at the FRONT stays there, at any pace."""
        request = job.request
        left_s = remaining_s(job, pace, rank.promised_tokens - job.output_tokens)
        level = max(FRONT, min(self.levels - 1, self.level_of(left_s) + rank.shift))
        level = FRONT if rank.level == FRONT else level
        first = request.arrival_s if level == FRONT else left_s
        key = (level, first, request.arrival_s, job.serial)
        return replace(rank, key=key, level=level, remaining_s=left_s)
