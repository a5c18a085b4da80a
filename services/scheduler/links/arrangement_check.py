"""Checks a batcher's answer: the scheduler applies only what it could have decided itself."""

import numpy as np
from numpy.typing import NDArray

from services.forecast import Ints
from services.policies.decision import WaitReason
from services.policies.interval import MAX_INTERVAL_S
from services.policies.snapshot import Bools, Candidates, WorkerSnapshot
from services.scheduler.core.events import Arranged, WorkerDecisionRow

Numbers = tuple[int, ...]
REASONS = frozenset(int(reason) for reason in WaitReason)


def find_flaw(candidates: Candidates, arranged: Arranged) -> str:
    """A sentence about the first thing that cannot be right; empty if there is none."""
    decisions = arranged.workers or ()
    if not arranged.next_s > candidates.now:
        return f"the next round is due at {arranged.next_s:g}, not after {candidates.now:g}"
    if not arranged.not_before_s <= candidates.now + MAX_INTERVAL_S:
        return f"no round before {arranged.not_before_s:g}: longer than {MAX_INTERVAL_S:g} s"
    workers = {worker.number: worker for worker in candidates.workers}
    if sorted(decision.worker for decision in decisions) != sorted(workers):
        return "there is not exactly one decision for each worker"
    index = _RowIndex(candidates.rows)
    for decision in decisions:
        if flaw := _decision_flaw(decision, workers[decision.worker], candidates, index):
            return f"worker {decision.worker}: {flaw}"
    if any(len(column) != len(candidates.rows) for column in arranged.notes.values()):
        return "a notes column does not have one number for each row"
    if any(each.reason not in REASONS for each in arranged.explanations):
        return "a reason is unknown"
    entering = [row for decision in decisions for row in decision.run]
    if len(set(entering)) < len(entering):
        return "a row runs twice"
    waits = arranged.next_s <= candidates.now + MAX_INTERVAL_S
    if (
        not entering
        and not waits
        and not candidates.is_running.any()
        and _any_could_run(candidates)
    ):
        return "nothing runs, although a request could"
    return ""


class _RowIndex:
    """Maps board rows to positions among the candidates."""

    def __init__(self, rows: Ints):
        self._order = np.argsort(rows)
        self._sorted = rows[self._order]

    def positions(self, rows: Numbers) -> Ints | None:
        """None unless all rows are candidates."""
        wanted = np.array(rows, np.int64)
        at = np.searchsorted(self._sorted, wanted)
        if len(wanted) and (int(at.max()) == len(self._sorted)):
            return None
        return self._order[at] if np.array_equal(self._sorted[at], wanted) else None


def _decision_flaw(
    decision: WorkerDecisionRow, worker: WorkerSnapshot, candidates: Candidates, index: _RowIndex
) -> str:
    columns = (decision.run, decision.pause, decision.victims)
    run, pause, victims = (index.positions(rows) for rows in columns)
    if run is None or pause is None or victims is None:
        return "it names a row that is not a candidate"
    jobs = candidates.jobs
    here = candidates.is_running & (jobs.home == worker.number)
    elsewhere = candidates.is_running & ~here
    if elsewhere[run].any() or not here[pause].all():
        return "it moves or pauses a request that does not run there"
    if np.isin(pause, run).any():
        return "it pauses a request that it also runs"
    if len(set(decision.victims)) < len(victims) or not np.isin(victims, run).all():
        return "it names victims that do not run"
    if not (here | _could_run(candidates, worker))[run].all():
        return "it runs a request that the worker could not hold"
    if len(decision.limits) != len(run):
        return f"{len(decision.limits)} limits for {len(run)} rows"
    limits: NDArray[np.float64] = np.array(decision.limits, float)
    lowest = np.minimum(jobs.cap, jobs.output + 1)[run]
    if np.any(limits < lowest) or np.any(limits > np.maximum(jobs.cap, jobs.limit)[run]):
        return "a limit is below the present output, or above max_tokens"
    return ""


def _could_run(candidates: Candidates, worker: WorkerSnapshot) -> Bools:
    """Candidates that this worker could run. It accepted those with KV there once already."""
    jobs = candidates.jobs
    fits = worker.can_run(jobs.model, jobs.longest)
    able: Bools = fits | (candidates.is_paused_with_kv() & (jobs.home == worker.number))
    return able


def _any_could_run(candidates: Candidates) -> bool:
    able = np.zeros(len(candidates.rows), bool)
    for worker in candidates.workers:
        if worker.max_running:
            able |= _could_run(candidates, worker)
    return bool((able & ~candidates.is_running).any())
