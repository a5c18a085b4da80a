"""Order → place → form: fills each worker's queue, running requests included, while memory
lasts."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.forecast import Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.results import explain_all, rank_victims, worker_decision
from services.policies.decision import Decision, WaitExplanations, WaitReason
from services.policies.form.demand import WorkerQueue
from services.policies.form.fill import FillResult, fill, fill_slots
from services.policies.form.registry import FORMS
from services.policies.interval import INTERVALS
from services.policies.place.eligibility import can_serve
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import RESIDENCIES, Preset
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Bools, Candidates, WorkerSnapshot

_NO_ROWS: Ints = np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class _FilledQueue:
    """A worker's queue: candidate positions in order, and the result of filling it, parallel to
    them."""

    worker: WorkerSnapshot
    at: Ints
    filled: FillResult

    def select(self, kept: Bools) -> "_FilledQueue":
        return _FilledQueue(self.worker, self.at[kept], self.filled.select(kept))


def arrange_continuous(
    candidates: Candidates, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """One decision for each worker."""

    def fill_queue(worker: WorkerSnapshot, at: Ints) -> _FilledQueue:
        is_running = candidates.is_running[at]
        if is_running.all() and not (len(at) and FORMS[preset.form].renews):
            # All continue, and nothing depends on their order in the queue.
            nothing = np.zeros(len(at))
            filled = FillResult(is_running, np.zeros(len(at), np.int64), nothing, nothing, 0.0)
            return _FilledQueue(worker, at, filled)
        at = at[np.lexsort((~is_running, candidates.queue_key[at]))]
        return _FilledQueue(worker, at, _fill(candidates, worker, at, forecasts, preset, rng))

    place = PLACEMENTS[preset.place]
    assigned = place.assign(candidates, preset.params)
    queues = [
        fill_queue(worker, (assigned == worker.number).nonzero()[0])
        for worker in candidates.workers
    ]
    if not place.by_turn:
        assigned = _assign_to_idle(candidates, assigned, queues, fill_queue)
    unassigned = (assigned == NOWHERE).nonzero()[0]
    explanations = [explain_all(candidates, unassigned, WaitReason.NO_WORKER)]
    for queue in queues:
        waits = ~candidates.is_running[queue.at]
        if not waits.any():
            continue
        waiting = queue.select(waits)
        filled, rows = waiting.filled, candidates.rows[waiting.at]
        explanations.append(
            WaitExplanations(rows, filled.reasons, filled.first_values, filled.second_values)
        )
    next_ones = [_NO_ROWS, *(queue.at[queue.filled.runs_next] for queue in queues)]
    ranks = rank_victims(candidates, preset, np.concatenate(next_ones))
    not_before_s = INTERVALS[preset.interval].ends(candidates, preset.params)
    return Decision(
        candidates.round,
        tuple(
            worker_decision(
                candidates, q.worker, preset, q.at, q.filled.runs_next, q.filled.peak, ranks
            )
            for q in queues
        ),
        WaitExplanations.concatenate(explanations),
        candidates.rows,
        candidates.jobs.serial,
        not_before_s if not_before_s > candidates.now else np.inf,
        not_before_s,
    )


def _assign_to_idle(
    candidates: Candidates,
    assigned: Ints,
    queues: list[_FilledQueue],
    fill_queue: Callable[[WorkerSnapshot, Ints], _FilledQueue],
) -> Ints:
    """Gives idle workers the requests that are not admitted where they were assigned: an immediate
    start on a slow worker beats a later one on a fast one. Changes `queues`; returns the new
    assignment. O(waiting), if a request waits beside an idle worker."""
    if all(queue.filled.runs_next.any() for queue in queues):
        return assigned
    assigned, free = assigned.copy(), ~candidates.is_running & ~candidates.is_paused_with_kv()
    for queue in queues:
        free[queue.at[queue.filled.runs_next]] = False
    for i, idle in enumerate(queues):
        if idle.filled.runs_next.any() or not free.any():
            continue
        spare = np.flatnonzero(free & (assigned != idle.worker.number))
        spare = spare[can_serve(candidates, idle.worker, spare)]
        spare = spare[np.argsort(candidates.queue_key[spare], kind="stable")]
        spare = spare[: idle.worker.max_running]
        if not len(spare):
            continue
        tried = fill_queue(idle.worker, np.concatenate([idle.at, spare]))
        runs_next = tried.filled.runs_next
        free[tried.at[runs_next]] = False
        assigned[tried.at[runs_next]] = idle.worker.number
        queues[i] = tried.select(assigned[tried.at] == idle.worker.number)
        for j, other in enumerate(queues):
            stays = assigned[other.at] == other.worker.number
            if not stays.all():
                queues[j] = other.select(stays)
    return assigned


def _fill(
    candidates: Candidates,
    worker: WorkerSnapshot,
    at: Ints,
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> FillResult:
    jobs, is_running = candidates.jobs.select(at), candidates.is_running[at]
    here = jobs.home == worker.number
    if (jobs.held[~here] | jobs.blocks[~here]).any():  # KV elsewhere does not count here
        held, blocks = np.where(here, jobs.held, 0), np.where(here, jobs.blocks, 0)
        jobs = jobs.replaced(held=held, blocks=blocks)
    limits = SLICES[preset.slice].limits(candidates, worker, at, preset.params)
    queue = WorkerQueue(jobs, is_running, limits, worker, forecasts, candidates.numbers)
    demand = FORMS[preset.form].demand(queue, preset.params, rng)
    first = int(is_running.argmin())
    alone = bool(jobs.longest[first] <= worker.kv_tokens)
    if RESIDENCIES[preset.residency].held_fast:
        holds = is_running | (candidates.is_paused_with_kv()[at] & here)
        return fill_slots(is_running, holds, demand, worker.max_running, alone)
    return fill(is_running, demand, worker.max_running, alone)
