"""Scheduling rounds: a decision about the board, and the directives that carry it out.

    snapshot → decide → difference to the current state → one plan for each worker it changes

In process, a round calls `decide`. With a batcher process, the same functions run in two places:
candidates are ranked and narrowed here, arranged there, and completed here when the answer arrives.
Rows that belong to another request by then are skipped.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from math import inf

import numpy as np

from services.core import Plan, QueueOrder, StaticBatch
from services.costs import UNMEASURED_KV
from services.forecast import Floats, Ints
from services.policies.decide import (
    arrange,
    complete_decision,
    decide,
    is_settled,
    rank_requests,
    select_candidates,
    takes_turns,
)
from services.policies.decision import Decision, WaitExplanations, WaitReason, WorkerDecision
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import Ranking, sorted_order
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import RESIDENCIES, Preset
from services.policies.snapshot import CHAIN, Bools, Candidates, Snapshot, stable_order
from services.scheduler.core.events import Arranged, SendPlan, WaitExplanationRow, WorkerDecisionRow
from services.scheduler.core.feasibility import FeasibilityCheck, work_ahead_s
from services.scheduler.core.jobs import Draft, Job, WorkerJobs
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase
from services.scheduler.core.static_batches import begin_batch
from services.scheduler.core.turns import MOST_WORKERS, Turns

NONE, QUEUED, RUNNING = RequestPhase.NONE, RequestPhase.QUEUED, RequestPhase.RUNNING
MAX_VICTIMS = 64  # per plan; the next plan names the next ones


class Rounds:
    """Runs a preset on a ledger. Owned by the state."""

    def __init__(self, preset: Preset, ledger: Ledger):
        self.preset = preset
        self.memory = PolicyMemory()
        self.number = 0
        self.next_s = inf  # time alone calls for a round then
        self.not_before_s = -inf  # events call for a round from then on
        self.candidates: Candidates | None = None  # those that the batcher is arranging
        self.decision = Decision(0)
        self.ranking: Ranking | None = None  # of the last round
        self.began_s = -inf  # time of the last round's snapshot
        self.reasons: Ints = np.zeros(len(WaitReason), np.int64)  # totals, by WaitReason
        self.late: tuple[Job, ...] = ()  # from the last round; see FeasibilityCheck
        self.turns = Turns(MOST_WORKERS if takes_turns(preset) else inf)
        self._ledger = ledger
        self._feasibility = FeasibilityCheck()
        self._batches = 0  # total static batches

    @property
    def prefix_blocks(self) -> int:
        """Leading prompt blocks that the preset places by, as hashes; 0 for none."""
        return CHAIN if PLACEMENTS[self.preset.place].cached else 0

    def decide(self, snapshot: Snapshot) -> Decision:
        """Decides in process; the round's number seeds the policies' random numbers."""
        self.number += 1
        decision = decide(snapshot, self.preset, self.memory, self._rng(), self.number)
        assert decision.ranking is not None
        self._ranked(snapshot, decision.ranking)
        return decision

    def settle(self, snapshot: Snapshot) -> Decision | None:
        """A decision without workers, if an arrangement would change nothing and no plan is
        drafted: a plan names victims, which only an arrangement updates. Else None."""
        drafted = any(worker.draft for worker in self._ledger.workers.values())
        if drafted or not is_settled(snapshot, self.preset):
            return None
        self.number += 1
        ranking = rank_requests(snapshot, self.preset, self.memory)
        self._ranked(snapshot, ranking)
        self.turns.clear()
        return complete_decision(Decision(self.number, not_before_s=snapshot.now), ranking)

    def prefer_cached(self, job: Job) -> None:
        """Makes the worker with the longest cached prefix of a new request due: a round without it
        would place the request elsewhere. O(workers) where workers take turns, else nothing."""
        hashes, workers = job.request.prefix_hashes, self._ledger.workers.values()
        if self.prefix_blocks and hashes and len(workers) > self.turns.most:
            blocks, number = max((w.prefixes.count_leading(hashes), -w.number) for w in workers)
            if blocks:
                self.turns.note(-number)

    def narrow(self, snapshot: Snapshot) -> Snapshot:
        """The snapshot of a round about the next turn of workers."""
        workers = self._ledger.workers.values()
        free = {worker.number: worker.free_share for worker in workers}
        turn = self.turns.take(snapshot.workers, free.__getitem__)
        return snapshot if len(turn) == len(snapshot.workers) else replace(snapshot, turn=turn)

    def select_candidates(self, snapshot: Snapshot) -> Candidates:
        """The part of `decide` that precedes the batcher's: the candidates for it to arrange."""
        self.number += 1
        ranking = rank_requests(snapshot, self.preset, self.memory)
        self.memory = ranking.memory
        self._ranked(snapshot, ranking)
        candidates = select_candidates(snapshot, ranking, self.preset, self.number)
        return replace(candidates, jobs=candidates.jobs.copy())

    def arrange(self, candidates: Candidates) -> Decision:
        """The rest of `decide`, when the batcher does not answer."""
        forecasts = self._ledger.board.forecasts
        return self.complete(arrange(candidates, forecasts, self.preset, self._rng()))

    def complete(self, arranged: Decision) -> Decision:
        """The part of `decide` that follows the batcher's."""
        assert self.ranking is not None
        return complete_decision(arranged, self.ranking)

    def _ranked(self, snapshot: Snapshot, ranking: Ranking) -> None:
        self.ranking, self.began_s = ranking, snapshot.now
        self._feasibility.update(snapshot, ranking)

    def _rng(self) -> np.random.Generator:
        return np.random.default_rng(self.number)

    def apply(self, decision: Decision) -> None:
        """Carries a decision out: moves requests in the ledger and drafts directives for
        workers."""
        self.decision = decision
        self.memory = decision.memory
        self.next_s, self.not_before_s = decision.next_s, decision.not_before_s
        self.reasons += np.bincount(decision.explanations.reasons, minlength=len(WaitReason))
        ledger = self._ledger
        serial = ledger.board.jobs.serial
        self.late = tuple(ledger.jobs_at(self._feasibility.pop_late(decision, serial)))
        current = ledger.board.phase != NONE  # by row: whether the decision is about its request
        current[decision.rows[serial[decision.rows] != decision.serials]] = False
        known = ((each, ledger.worker_numbered(each.worker)) for each in decision.workers)
        # A worker may have started to drain, or to be suspected, during the round.
        parts = [(each, worker) for each, worker in known if worker and worker.takes_requests]
        if parts:
            decisions, workers = zip(*parts, strict=True)
            self._apply_to_workers(decisions, workers, current)
        if not ledger.waiting:
            self.next_s = inf  # time alone changes nothing
        if not ledger.board.any_queued:
            self.turns.forget_queue()

    def _apply_to_workers(
        self,
        decisions: Sequence[WorkerDecision],
        workers: Sequence[WorkerJobs],
        current: Bools,
    ) -> None:
        """Pauses, then longer grants, then admissions, each for all workers together."""
        ledger = self._ledger
        phase, columns = ledger.board.phase, ledger.board.jobs
        numbers = np.array([worker.number for worker in workers])

        def runs_at(rows: Ints, which: Ints) -> Bools:
            runs: Bools = (phase[rows] == RUNNING) & (columns.home[rows] == numbers[which])
            return runs & current[rows]

        pause, which = _columns([each.pause for each in decisions])
        residency = RESIDENCIES[self.preset.residency].paused
        ledger.pause(self._jobs(pause[runs_at(pause, which)]), residency)

        run, which = _columns([each.run for each in decisions])
        limits = np.concatenate([each.limits for each in decisions])
        longer = runs_at(run, which) & (limits > columns.limit[run])
        over = longer & (columns.output[run] >= columns.limit[run])  # of a batch
        ledger.extend(run[longer], limits[longer])

        enters = (phase[run] == QUEUED).nonzero()[0]
        first = which[enters].searchsorted(which[enters])
        slots = np.array([worker.slots - len(worker.running) for worker in workers])
        enters = enters[np.arange(len(enters)) - first < slots[which[enters]]]
        enters = enters[current[run[enters]]]
        stopping = ledger.stopping() if len(enters) else {}
        if stopping:
            names = ledger.board.names[run[enters]].tolist()
            homes = [workers[nth] for nth in which[enters].tolist()]
            named = zip(names, homes, strict=True)
            enters = enters[[stopping.get(name, home) is home for name, home in named]]
        entering = self._jobs(run[enters])
        homes = [workers[nth] for nth in which[enters].tolist()]
        ledger.admit(entering, homes, limits[enters].tolist())
        for nth, (decision, worker) in enumerate(zip(decisions, workers, strict=True)):
            if decision.lockstep:
                members = self._jobs(run[over & (which == nth)])
                members += compress(entering, which[enters] == nth)
                self._begin_batch(members, worker)
            worker.apply_decision(decision)

    def _begin_batch(self, members: list[Job], worker: WorkerJobs) -> None:
        if not members:
            return
        self._batches += 1
        names = tuple(job.request_id for job in members)
        worker.draft.batches.append(StaticBatch(self._batches, names))
        worker.served.append(begin_batch(members, self._ledger))

    def _jobs(self, rows: Ints) -> list[Job]:
        return list(self._ledger.jobs_at(rows.tolist()))

    # Plans

    def pop_plans(self) -> list[SendPlan]:
        """Returns one plan for every worker with changed directives since the last call."""
        changed = [each for each in self._ledger.workers.items() if each[1].draft]
        orders = None
        if changed and self.ranking is not None and self.preset.keeps_kv:
            orders = QueueOrders(self._ledger, self.ranking, [each.number for _, each in changed])
        victims = self._victims([worker for _, worker in changed])
        return [
            SendPlan(worker_id, worker.link, self._plan(worker, named, orders))
            for (worker_id, worker), named in zip(changed, victims, strict=True)
        ]

    def _plan(
        self, worker: WorkerJobs, victims: tuple[str, ...], orders: "QueueOrders | None"
    ) -> Plan:
        draft, worker.draft = worker.draft, Draft()
        worker.plan_seq += 1
        keeps_kv = self.preset.keeps_kv
        return Plan(
            seq=worker.plan_seq,
            admit=tuple(draft.admit),
            extend=tuple(draft.extend),
            pause=tuple(draft.pause),
            cancel=tuple(draft.cancel),
            victims=victims,
            order=orders.for_worker(worker.number) if orders else QueueOrder(),
            residency=self.preset.residency if keeps_kv else "",
            costs=worker.cost.kv_costs if keeps_kv else UNMEASURED_KV,
            batches=tuple(batch for batch in draft.batches if batch.members),
            prefix_blocks=self.prefix_blocks,
        )

    def _victims(self, workers: Sequence[WorkerJobs]) -> list[tuple[str, ...]]:
        """The names of each worker's victims that still run there."""
        if not workers:
            return []
        board = self._ledger.board
        rows, which = _columns([worker.victims[:MAX_VICTIMS] for worker in workers])
        numbers = np.array([worker.number for worker in workers])
        here = (board.phase[rows] == RUNNING) & (board.jobs.home[rows] == numbers[which])
        names, ends = board.names[rows[here]].tolist(), np.arange(1, len(workers) + 1)
        found, first = [], 0
        for worker, last in zip(workers, which[here].searchsorted(ends).tolist(), strict=True):
            named, first = tuple(names[first:last]), last
            if worker.draining:  # no round decides about it: those adopted since then follow
                named = tuple(dict.fromkeys((*named, *reversed(worker.running))))[:MAX_VICTIMS]
            found.append(named)
        return found


class QueueOrders:
    """The queue orders of some workers after one round.

    A worker's is its running requests, most urgent first, then its waiting ones with KV there and
    their expected wait: the remaining time of all requests ahead, at most the time until ageing
    brings it to the front ("ALISE" (Zhao et al., 2024), Eq. 7). Waiting requests without KV count
    for this worker's share of the fleet; what they add is looked up once for all workers. O(jobs)
    for all of them if a request has KV at any.
    """

    def __init__(self, ledger: Ledger, ranking: Ranking, numbers: list[int]):
        board, rows = ledger.board, ranking.rows
        # By board row, in which columns are read in sequence.
        phase, held, home = board.phase, board.jobs.held, board.jobs.home
        mine = np.zeros(max(int(home.max()), *numbers) + 2, bool)
        mine[numbers] = True
        placed = mine[home]  # the last place is that of NOWHERE, and of no worker
        waits = phase == QUEUED
        runs = placed & (phase == RUNNING)
        there = (runs | (placed & waits & (held > 0)))[rows].nonzero()[0]
        there = there[sorted_order(ranking.key[there], board.jobs.serial[rows[there]])]
        homes = board.jobs.home[rows[there]]
        by_home = stable_order(homes)
        there, homes = there[by_home], homes[by_home]
        rests = ~runs[rows[there]]
        waits_s = np.zeros(len(there))
        if rests.any():
            share = np.where(waits & (held == 0), 1 / max(1, len(ledger.workers)), 0.0)[rows]
            ahead_s = _ahead_at_home_s(ranking, there, homes)[rests]
            ahead_s += work_ahead_s(ranking, there[rests], share)
            waits_s[rests] = np.minimum(ahead_s, ranking.lift_s[there[rests]])
        runs_first = stable_order(2 * homes + rests)
        self._names = tuple(board.names[rows[there[runs_first]]].tolist())
        self._waits_s = tuple(waits_s[runs_first].tolist())
        firsts, lasts = homes.searchsorted(numbers), homes.searchsorted(numbers, side="right")
        self._parts = dict(zip(numbers, map(slice, firsts.tolist(), lasts.tolist()), strict=True))

    def for_worker(self, number: int) -> QueueOrder:
        part = self._parts[number]
        return QueueOrder(self._names[part], self._waits_s[part])


def _ahead_at_home_s(ranking: Ranking, at: Ints, homes: Ints) -> Floats:
    """The remaining time of all requests at its home that are ahead of each of these, which are
    sorted by home, then by key."""
    key = ranking.key[at]
    begins = np.ones((2, len(at)), bool)  # requests of one home, and those with the same key
    np.not_equal(homes[1:], homes[:-1], out=begins[0, 1:])
    np.not_equal(key[1:], key[:-1], out=begins[1, 1:])
    begins[1] |= begins[0]
    first, level = np.maximum.accumulate(np.where(begins, np.arange(len(at)), 0), axis=1)
    nth, which = np.arange(len(at)) - first, begins[0].cumsum() - 1
    totals_s = np.zeros((which[-1] + 1, nth.max() + 2))
    totals_s[which, nth + 1] = ranking.remaining_s[at]
    ahead_s: Floats = totals_s.cumsum(axis=1)[which, level - first]
    return ahead_s


def _columns(parts: Sequence[Ints]) -> tuple[Ints, Ints]:
    """The rows of all parts, and the index of the part of each."""
    sizes = [len(part) for part in parts]
    return np.concatenate(parts), np.arange(len(parts)).repeat(sizes)


def build_decision(candidates: Candidates, arranged: Arranged) -> Decision:
    """The decision that a batcher's answer describes."""
    return Decision(
        candidates.round,
        tuple(_worker_decision(row) for row in arranged.workers or ()),
        _explanations(arranged.explanations),
        rows=candidates.rows,
        serials=candidates.jobs.serial,
        next_s=arranged.next_s,
        not_before_s=arranged.not_before_s,
        numbers=dict(arranged.numbers),
        notes={name: np.array(column) for name, column in arranged.notes.items()},
    )


def _explanations(rows: Sequence[WaitExplanationRow]) -> WaitExplanations:
    if not rows:
        return WaitExplanations()
    row, reason, first, second = zip(*rows, strict=True)
    return WaitExplanations(
        np.array(row), np.array(reason), np.array(first, float), np.array(second, float)
    )


def _worker_decision(row: WorkerDecisionRow) -> WorkerDecision:
    columns = (row.run, row.limits, row.pause, row.victims)
    run, limits, pause, victims = (np.array(column, np.int64) for column in columns)
    return WorkerDecision(row.worker, run, limits, pause, victims, row.peak_tokens, row.lockstep)
