"""A round: one question of the board, and what of its answer is news to whom.

    snapshot → decide → the difference to what runs → one plan for each worker it concerns

Decided here, or, where the batcher is a process of its own, narrowed here, arranged there and
carried out when the answer has come: the same functions, so the same decisions. An answer that
does not come is made here. Rows that were given to another request meanwhile are left alone.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from services.core import Plan, QueuePosition, StaticBatch
from services.forecast import Ints
from services.policies.decide import arrange, complete_decision, rank_requests, select_candidates
from services.policies.decision import (
    Decision,
    WaitExplanation,
    WaitExplanations,
    WaitReason,
    WorkerDecision,
)
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import Ranking
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import RESIDENCIES, Preset
from services.policies.snapshot import CHAIN, Candidates, Snapshot
from services.scheduler.core import events as ev
from services.scheduler.core import static_batches
from services.scheduler.core.board import RequestPhase
from services.scheduler.core.jobs import Draft, Job, WorkerJobs
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.outlook import Outlook, ahead_s

MOST_VICTIMS = 64  # named in a plan; the next one names the next


class Rounds:
    """The preset at work on a ledger. Owned by the state."""

    def __init__(self, preset: Preset, ledger: Ledger):
        self.preset = preset
        self.memory = PolicyMemory()
        self.number = 0
        self.next_s = inf  # when time alone calls for the next one
        self.not_before_s = -inf  # when events may
        self.contest: Candidates | None = None  # of the round that is out to be arranged
        self.decision = Decision(0)
        self.posed_s = -inf  # when the last was
        self.said: Ints = np.zeros(
            len(WaitReason), np.int64
        )  # of those who waited, by Reason, so far
        self.late: tuple[Job, ...] = ()  # of the last round; see Outlook
        self._ledger = ledger
        self._outlook = Outlook()
        self._ranking: Ranking | None = None
        self._batches = 0  # static ones so far

    @property
    def prefix_blocks(self) -> int:
        """Of a text, how many of whose first blocks' hashes help to place it; 0: none do."""
        return CHAIN if PLACEMENTS[self.preset.place].cached else 0

    def pose(self, snapshot: Snapshot) -> Candidates:
        """Everybody in order, and of these who run or could."""
        self.number += 1
        self._ranking = rank_requests(snapshot, self.preset, self.memory)
        self.memory = self._ranking.memory
        self.posed_s = snapshot.now
        self._outlook.look(snapshot, self._ranking)
        return select_candidates(snapshot, self._ranking, self.preset, self.number)

    def arrange(self, contest: Candidates) -> Decision:
        """By our own copy of the functions; the round's number seeds what is drawn."""
        rng = np.random.default_rng(contest.round)
        return arrange(contest, self._ledger.board.forecasts, self.preset, rng)

    def take(self, arranged: Decision, now: float) -> list[ev.Action]:
        """Carry a decision out; what gateways must be told of it."""
        assert self._ranking is not None
        self.decision = decision = complete_decision(arranged, self._ranking)
        self.memory = decision.memory
        self.next_s, self.not_before_s = decision.next_s, decision.not_before_s
        self.said += np.bincount(decision.explanations.reasons, minlength=len(WaitReason))
        serial = self._ledger.board.jobs.serial
        self.late = tuple(self._ledger.jobs_of(self._outlook.late(decision, serial)))
        serials = serial[decision.rows]
        stale = frozenset(decision.rows[serials != decision.serials].tolist())
        told: list[ev.Action] = []
        for share in decision.workers:
            worker = self._ledger.worker_of(share.worker)
            if worker and not worker.leaving:  # it may have said so since the round was posed
                told += self._carry_out(share, worker, stale, now)
        if not self._ledger.waiting:
            self.next_s = inf  # there is nobody whom waiting could move
        return told

    def why(self, job: Job) -> WaitExplanation | None:
        """What the last round found of one that waits."""
        return self.decision.explanations.for_row(job.row)

    @property
    def ranking(self) -> Ranking | None:
        """Of the last round that was posed; None before the first."""
        return self._ranking

    def _carry_out(
        self, share: WorkerDecision, worker: WorkerJobs, stale: frozenset[int], now: float
    ) -> Iterator[ev.Action]:
        ledger = self._ledger
        board = ledger.board
        paused = RESIDENCIES[self.preset.residency].paused
        for _, job in self._current(share.pause, stale):
            if job.request_id in worker.running:
                ledger.pause(job, worker, paused, now)
        enters = board.phase[share.run] == RequestPhase.QUEUED
        longer = (board.phase[share.run] == RequestPhase.RUNNING) & (
            share.limits > board.jobs.limit[share.run]
        )
        jobs, limits = board.jobs, share.limits[longer].tolist()
        together: list[Job] = []
        for at, job in self._current(share.run[longer], stale):
            if job.request_id in worker.running:
                if share.lockstep and jobs.output[job.row] >= jobs.limit[job.row]:
                    together.append(job)  # its last batch is over, for it
                ledger.extend(job, worker, limits[at])
        places = max(0, worker.places - len(worker.running))
        limits = share.limits[enters].tolist()
        for at, job in self._current(share.run[enters][:places], stale):
            if ledger.is_leaving(job, worker):
                continue
            yield self._admit(job, worker, limits[at], now)
            if share.lockstep:
                together.append(job)
        if together:
            self._batch(together, worker, now)
        worker.heed(share)

    def _batch(self, members: list[Job], worker: WorkerJobs, now: float) -> None:
        """A static one of these, who begin now."""
        self._batches += 1
        names = tuple(job.request_id for job in members)
        worker.draft.batches.append(StaticBatch(self._batches, names))
        worker.served.append(static_batches.begin(members, self._ledger.board, now))

    def _current(self, rows: Ints, stale: frozenset[int]) -> Iterator[tuple[int, Job]]:
        """The jobs of these rows, with their places among them, but for those that are gone."""
        for at, row in enumerate(rows.tolist()):
            job = None if row in stale else self._ledger.job_of(row)
            if job:
                yield at, job

    def _admit(self, job: Job, worker: WorkerJobs, limit: int, now: float) -> ev.Action:
        ledger = self._ledger
        if ledger.admit(job, worker, limit, now):
            view = worker.view
            return ev.Place(job.link, job.request_id, view.worker_id, view.address, job.queued_s)
        return ev.Resume(job.link, job.request_id, ledger.held(job))

    # Plans

    def take_plans(self, now: float) -> list[ev.SendPlan]:
        """One plan for every worker whose directives have changed since the last call."""
        return [
            ev.SendPlan(worker_id, worker.link, self._plan(worker, now))
            for worker_id, worker in self._ledger.workers.items()
            if worker.draft
        ]

    def _plan(self, worker: WorkerJobs, now: float) -> Plan:
        draft, worker.draft = worker.draft, Draft()
        worker.plan_seq += 1
        plan = Plan(
            seq=worker.plan_seq,
            admit=tuple(draft.admit),
            extend=tuple(draft.extend),
            pause=tuple(draft.pause),
            cancel=tuple(draft.cancel),
            victims=self._victims(worker),
            batches=tuple(batch for batch in draft.batches if batch.members),
            prefix_blocks=self.prefix_blocks,
        )
        if not self.preset.keeps_kv:
            return plan
        return replace(
            plan,
            order=self._standings(worker, now),
            residency=self.preset.residency,
            costs=worker.cost.kv_costs,
        )

    def _victims(self, worker: WorkerJobs) -> tuple[str, ...]:
        """The first of them: the worker asks for more with its next report."""
        names = self._ledger.names(worker.victims[:MOST_VICTIMS].tolist())
        return tuple(name for name in names if name in worker.running)

    def _standings(self, worker: WorkerJobs, now: float) -> tuple[QueuePosition, ...]:
        """Who runs at a worker, most urgent first, then who waits with KV there and how long:
        ALISE's EWT (papers/001 Eq. 7), the time that all who come before it still take, or until
        ageing has brought it to the front, whichever is less. Of those that wait without KV the
        worker gets its share. O(jobs) where anybody rests there."""
        if self._ranking is None:
            return ()
        board, ranking = self._ledger.board, self._ranking
        phase, home, held = board.phase, board.jobs.home, board.jobs.held
        rows = ranking.rows
        here = home[rows] == worker.number
        runs = here & (phase[rows] == RequestPhase.RUNNING)
        waits = phase[rows] == RequestPhase.QUEUED
        rests = here & waits & (held[rows] > 0)
        running = np.flatnonzero(runs)
        running = running[np.lexsort((board.jobs.serial[rows[running]], ranking.key[running]))]
        names = self._ledger.names(rows[running].tolist())
        standings = [QueuePosition(name, 0.0) for name in names]
        if not rests.any():
            return tuple(standings)
        resting = np.flatnonzero(rests)
        resting = resting[np.lexsort((board.jobs.serial[rows[resting]], ranking.key[resting]))]
        names = self._ledger.names(rows[resting].tolist())
        share = np.where(runs | rests, 1.0, np.where(waits & (held[rows] == 0), self._share(), 0.0))
        wait_s = ahead_s(ranking, resting, share)
        left_s = np.minimum(wait_s, ranking.lift_s[resting]).tolist()
        return (*standings, *(QueuePosition(n, w) for n, w in zip(names, left_s, strict=True)))

    def _share(self) -> float:
        return 1 / max(1, len(self._ledger.workers))


def decision_of(contest: Candidates, arranged: ev.Arranged) -> Decision:
    """A batcher's portions as the decision they stand for."""
    shares = [_share_of(portion) for portion in arranged.portions or ()]
    return Decision(
        contest.round,
        tuple(shares),
        _explanations(arranged.explanations),
        rows=contest.rows,
        serials=contest.jobs.serial,
        next_s=arranged.next_s,
        not_before_s=arranged.not_before_s,
        numbers=dict(arranged.numbers),
        notes={name: np.array(column) for name, column in arranged.notes.items()},
    )


def _explanations(given: Sequence[ev.WaitExplanationRow]) -> WaitExplanations:
    if not given:
        return WaitExplanations()
    rows, reasons, first, second = zip(*given, strict=True)
    return WaitExplanations(
        np.array(rows), np.array(reasons), np.array(first, float), np.array(second, float)
    )


def _share_of(portion: ev.Portion) -> WorkerDecision:
    def rows(values: Sequence[int]) -> Ints:
        return np.array(values, np.int64)

    return WorkerDecision(
        portion.worker,
        rows(portion.run),
        rows(portion.limits),
        rows(portion.pause),
        rows(portion.victims),
        portion.peak_tokens,
        portion.lockstep,
    )
