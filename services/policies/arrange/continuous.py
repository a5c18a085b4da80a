"""Order → place → form: fills each worker's queue, running requests included, while memory
lasts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from services.forecast import Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.results import explain_all, worker_decision
from services.policies.decision import Decision, WaitExplanations, WaitReason
from services.policies.form.demand import WorkerQueue
from services.policies.form.fill import Filled, fill, fill_slots
from services.policies.form.registry import FORMS
from services.policies.interval import INTERVALS
from services.policies.place.eligibility import takes
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import RESIDENCIES, Preset
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Bools, Candidates, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class _Line:
    """A worker's queue, in order, and the result of filling it, parallel to it."""

    worker: WorkerSnapshot
    at: Ints
    filled: Filled

    def only(self, kept: Bools) -> "_Line":
        of = self.filled
        rest = Filled(of.run[kept], of.reasons[kept], of.a[kept], of.b[kept], of.peak)
        return _Line(self.worker, self.at[kept], rest)


def arrange_continuous(
    candidates: Candidates, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """Every worker's share of the candidates."""

    def line_of(worker: WorkerSnapshot, at: Ints) -> _Line:
        at = at[np.lexsort((~candidates.is_running[at], candidates.queue_key[at]))]
        runs = candidates.is_running[at]
        if not runs.all() or (len(at) and FORMS[preset.form].renews):
            return _Line(worker, at, _filled(candidates, worker, at, forecasts, preset, rng))
        nothing = np.zeros(len(at))
        return _Line(worker, at, Filled(runs, np.zeros(len(at), np.int64), nothing, nothing, 0.0))

    place = PLACEMENTS[preset.place]
    assigned = place.assign(candidates, preset.params)
    lines = [
        line_of(worker, np.flatnonzero(assigned == worker.number)) for worker in candidates.workers
    ]
    if not place.by_turn:
        assigned = _dealt_to_idle(candidates, assigned, lines, line_of)
    shares, explanations = (
        [],
        [explain_all(candidates, np.flatnonzero(assigned == NOWHERE), WaitReason.NO_WORKER)],
    )
    for line in lines:
        filled, waits = line.filled, ~candidates.is_running[line.at]
        rows = candidates.rows[line.at[waits]]
        explanations.append(
            WaitExplanations(rows, filled.reasons[waits], filled.a[waits], filled.b[waits])
        )
        shares.append(
            worker_decision(candidates, line.worker, preset, line.at, filled.run, filled.peak)
        )
    not_before_s = INTERVALS[preset.interval].ends(candidates, preset.params)
    return Decision(
        candidates.round,
        tuple(shares),
        WaitExplanations.concatenate(explanations),
        candidates.rows,
        candidates.jobs.serial,
        not_before_s if not_before_s > candidates.now else np.inf,
        not_before_s,
    )


def _dealt_to_idle(
    candidates: Candidates,
    assigned: Ints,
    lines: list[_Line],
    line_of: Callable[[WorkerSnapshot, Ints], _Line],
) -> Ints:
    """Gives idle workers the requests that are not admitted where they were assigned: an immediate
    start on a slow worker beats a later one on a fast one. Changes `lines`; returns the new
    dealing. O(waiting), if a request waits beside an idle worker."""
    assigned, free = assigned.copy(), ~candidates.is_running & ~candidates.is_paused_with_kv()
    for line in lines:
        free[line.at[line.filled.run]] = False
    for i, idle in enumerate(lines):
        if idle.filled.run.any() or not free.any():
            continue
        spare = np.flatnonzero(free & (assigned != idle.worker.number))
        spare = spare[takes(candidates, idle.worker, spare)]
        spare = spare[np.argsort(candidates.queue_key[spare], kind="stable")][
            : idle.worker.max_running
        ]
        if not len(spare):
            continue
        tried = line_of(idle.worker, np.concatenate([idle.at, spare]))
        runs = tried.filled.run
        free[tried.at[runs]] = False
        assigned[tried.at[runs]] = idle.worker.number
        lines[i] = tried.only(assigned[tried.at] == idle.worker.number)
        for j, other in enumerate(lines):
            stays = assigned[other.at] == other.worker.number
            if not stays.all():
                lines[j] = other.only(stays)
    return assigned


def _filled(
    candidates: Candidates,
    worker: WorkerSnapshot,
    at: Ints,
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> Filled:
    jobs, runs = candidates.jobs.select(at), candidates.is_running[at]
    here = jobs.home == worker.number  # a moving request's KV elsewhere does not count here
    jobs = replace(jobs, held=np.where(here, jobs.held, 0), blocks=np.where(here, jobs.blocks, 0))
    limits = SLICES[preset.slice].limits(candidates, worker, at, preset.params)
    queue = WorkerQueue(jobs, runs, limits, worker, forecasts, candidates.numbers)
    demand = FORMS[preset.form].demand(queue, preset.params, rng)
    first = int(np.argmin(runs))
    alone = bool(jobs.prompt[first] + jobs.cap[first] <= worker.kv_tokens)
    if RESIDENCIES[preset.residency].held_fast:
        holds = runs | (candidates.is_paused_with_kv()[at] & here)
        return fill_slots(runs, holds, demand, worker.max_running, alone)
    return fill(runs, demand, worker.max_running, alone)
