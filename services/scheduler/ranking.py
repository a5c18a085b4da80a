"""Every live job's rank, kept up to date, and the queue that they sort."""

from collections.abc import Iterable, Mapping
from heapq import heappop, heappush
from math import inf

from services.core import CostModel, Standing
from services.scheduler.jobs import Job, Phase, Rank, WorkerJobs
from services.scheduler.order import Ordering
from services.scheduler.pace import Pace, pace_of
from services.scheduler.queue import JobQueue

UNMEASURED = CostModel(base_s=0.01, prefill_token_s=1e-4, decode_seq_s=1e-4, context_token_s=0.0)


class Ranking:
    """The order as it stands. Owned by the ledger, which says what happened to which job."""

    def __init__(self, ordering: Ordering):
        self.queue = JobQueue()
        self._ordering = ordering
        self._pace: Pace = pace_of([UNMEASURED], 1)
        self._promotions: list[tuple[float, int, Job]] = []

    # Jobs

    def begin(self, job: Job, now: float) -> None:
        """Its forecast has come: it waits."""
        job.rank = self._ordering.begin(job, self._pace, now)
        self._push(job)

    def wait(self, job: Job, now: float) -> None:
        """It waits again."""
        job.rank = self._ordering.renew(job, self._pace)
        job.rank = self._ordering.wait(job, now)
        self._push(job)

    def renew(self, job: Job) -> None:
        """It has more tokens, or KV, or less of it."""
        rank = self._ordering.renew(job, self._pace)
        if job.phase is Phase.QUEUED:
            self._move(job, rank)
        else:
            job.rank = rank

    def take(self, job: Job) -> None:
        """Out of the queue."""
        self.queue.remove(job)

    def _push(self, job: Job) -> None:
        self.queue.push(job)
        self._await_promotion(job)

    def _move(self, job: Job, rank: Rank) -> None:
        self.queue.remove(job)
        job.rank = rank
        self._push(job)

    # Time

    def next_promotion_s(self) -> float:
        """When the next job that waits moves up."""
        while self._promotions and not self._is_current(*self._promotions[0]):
            heappop(self._promotions)
        return self._promotions[0][0] if self._promotions else inf

    def promote(self, now: float) -> bool:
        """Move up all that have waited long enough; whether that changed who is first."""
        before = self.queue.head(1)
        while self.next_promotion_s() <= now:
            job = heappop(self._promotions)[2]
            self._move(job, self._ordering.promote(job, self._pace, now))
        return self.queue.head(1) != before

    def _await_promotion(self, job: Job) -> None:
        due_s = self._ordering.promotion_s(job.rank)
        if due_s < inf:
            heappush(self._promotions, (due_s, job.serial, job))

    def _is_current(self, due_s: float, serial: int, job: Job) -> bool:
        return job.phase is Phase.QUEUED and self._ordering.promotion_s(job.rank) == due_s

    # Pace

    def keep_pace(self, workers: Iterable[WorkerJobs], jobs: Iterable[Job], anew: bool) -> None:
        """Follow how many run at once, by doublings, and, `anew`, the workers' cost models: all
        are ranked again then. O(jobs log jobs), rarely."""
        there = list(workers)
        if not there:
            return
        seqs = max(1.0, sum(len(worker.running) for worker in there) / len(there))
        if anew or not self._pace.still_fits(seqs):
            self._pace = pace_of([worker.cost for worker in there], seqs)
            self._rank_again(jobs)

    def _rank_again(self, jobs: Iterable[Job]) -> None:
        for job in jobs:
            if job.phase is not Phase.FORECASTING:
                job.rank = self._ordering.renew(job, self._pace)
        waiting = list(self.queue)
        self.queue.replace(waiting)
        self._promotions.clear()
        for job in waiting:
            self._await_promotion(job)

    # What a plan says of it

    def standings(
        self, worker_id: str, workers: Mapping[str, WorkerJobs], now: float
    ) -> tuple[Standing, ...]:
        """Who runs at a worker, most urgent first, then who waits with KV there and how long:
        ALISE's EWT (papers/001 Eq. 7), the time that all who come before it still take, or until
        ageing has brought it to the front, whichever is less. Of those that wait without KV the
        worker gets its share. O(queue), where anybody rests there."""
        running = sorted(workers[worker_id].running.values(), key=lambda job: job.rank.key)
        standings = [Standing(job.request_id, 0.0) for job in running]
        ahead_s, before = 0.0, 0
        for job in self.queue if self._rests(worker_id) else ():
            rank = job.rank
            while before < len(running) and running[before].rank.key < rank.key:
                ahead_s += running[before].rank.remaining_s
                before += 1
            if job.resting and job.home == worker_id:
                wait_s = min(ahead_s, self._ordering.front_s(rank, now))
                standings.append(Standing(job.request_id, wait_s))
                ahead_s += rank.remaining_s
            elif not job.resting:
                ahead_s += rank.remaining_s / len(workers)
        return tuple(standings)

    def _rests(self, worker_id: str) -> bool:
        return any(job.held_tokens and job.home == worker_id for job in self.queue)
