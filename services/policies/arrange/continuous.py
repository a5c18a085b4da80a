"""Order → place → form: fills each worker's queue, running requests included, while memory
lasts. The queues of all workers are parts of the same columns, and are filled together."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import compress

import numpy as np

from services.forecast import Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.results import WorkerParts, explain_all, worker_decisions
from services.policies.decision import Decision, WaitExplanations, WaitReason
from services.policies.form.demand import WorkerQueues
from services.policies.form.fill import FillResult, fill, fill_slots
from services.policies.form.lines import Lines
from services.policies.form.registry import FORMS
from services.policies.interval import INTERVALS
from services.policies.order.ranking import sorted_order
from services.policies.place.adapters import WAITS_FOR_ADAPTER, AdapterSlots, slots_in_use
from services.policies.place.eligibility import can_serve
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import RESIDENCIES, Preset
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Bools, Candidates, WorkerSnapshot, stable_order

_Workers = tuple[WorkerSnapshot, ...]


@dataclass(frozen=True, slots=True)
class _FilledQueues:
    """The queues of some workers: candidate positions, those of each queue in its order, the index
    of each one's worker, and the result of filling them, parallel to them."""

    workers: _Workers
    at: Ints
    which: Ints
    limits: Ints
    filled: FillResult

    @property
    def numbers(self) -> Ints:
        return _numbers(self.workers)

    @property
    def parts(self) -> WorkerParts:
        runs_next, peaks = self.filled.runs_next, self.filled.peaks
        lockstep = np.zeros(len(peaks), bool)
        columns = self.at, self.which, self.limits, runs_next, peaks
        return WorkerParts(self.numbers, *columns, lockstep)

    def is_idle(self) -> Bools:
        """Workers that run nothing next."""
        runs = np.bincount(self.which[self.filled.runs_next], minlength=len(self.workers))
        idle: Bools = runs == 0
        return idle

    def select(self, kept: Bools | Ints) -> "_FilledQueues":
        columns = self.at[kept], self.which[kept], self.limits[kept]
        return _FilledQueues(self.workers, *columns, self.filled.select(kept))

    def replaced(self, i: int, other: "_FilledQueues") -> "_FilledQueues":
        """With the only queue of `other` as that of the worker of index `i`."""
        both = self.select(self.which != i).joined(other, np.array([i]))
        return both.select(stable_order(both.which))

    def joined(self, other: "_FilledQueues", of: Ints) -> "_FilledQueues":
        """Those of `other` as the queues of the workers of the indices `of`, which have none here,
        then these."""
        peaks = self.filled.peaks.copy()
        peaks[of] = other.filled.peaks
        return _FilledQueues(
            self.workers,
            np.concatenate([other.at, self.at]),
            np.concatenate([of[other.which], self.which]),
            np.concatenate([other.limits, self.limits]),
            other.filled.followed_by(self.filled, peaks),
        )


def arrange_continuous(
    candidates: Candidates, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """One decision for each worker."""

    def fill_queues(workers: _Workers, at: Ints, which: Ints) -> _FilledQueues:
        return _fill_queues(candidates, workers, at, which, forecasts, preset, rng)

    place = PLACEMENTS[preset.place]
    assigned = place.assign(candidates, preset.params)
    queues = fill_queues(candidates.workers, *candidates.by_worker(assigned))
    if not place.by_turn:
        assigned, queues = _assign_to_idle(candidates, assigned, queues, fill_queues)
    not_before_s = INTERVALS[preset.interval].ends(candidates, preset.params)
    return Decision(
        candidates.round,
        worker_decisions(candidates, preset, queues.parts),
        _explain(candidates, assigned, queues),
        candidates.rows,
        candidates.jobs.serial,
        not_before_s if not_before_s > candidates.now else np.inf,
        not_before_s,
    )


def _assign_to_idle(
    candidates: Candidates,
    assigned: Ints,
    queues: _FilledQueues,
    fill_queues: Callable[[_Workers, Ints, Ints], _FilledQueues],
) -> tuple[Ints, _FilledQueues]:
    """The assignment and the queues with idle workers given the requests that are not admitted
    where they were assigned: an immediate start on a slow worker beats a later one on a fast one.
    O(waiting), if a request waits beside an idle worker."""
    idle = queues.is_idle().nonzero()[0].tolist()
    if not idle:
        return assigned, queues
    assigned, free = assigned.copy(), ~candidates.is_running & ~candidates.is_paused_with_kv()
    free[queues.at[queues.filled.runs_next]] = False
    numbers = queues.numbers
    for i in idle:
        if not free.any():
            break
        worker = candidates.workers[i]
        spare = np.flatnonzero(free & (assigned != worker.number))
        spare = spare[can_serve(candidates, worker, spare)]
        spare = spare[np.argsort(candidates.queue_key[spare], kind="stable")]
        here = np.where(assigned == worker.number, assigned, NOWHERE)  # other slots do not matter
        spare = AdapterSlots(candidates, here).admit(spare, i)
        spare = spare[: worker.max_running]
        if not len(spare):
            continue
        at = np.concatenate([queues.at[queues.which == i], spare])
        tried = fill_queues((worker,), at, np.zeros(len(at), np.int64))
        enters = tried.at[tried.filled.runs_next]
        free[enters] = False
        assigned[enters] = worker.number
        queues = queues.replaced(i, tried)
        queues = queues.select(assigned[queues.at] == numbers[queues.which])
    return assigned, queues


def _fill_queues(
    candidates: Candidates,
    workers: _Workers,
    at: Ints,
    which: Ints,
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> _FilledQueues:
    """The queues of these workers, filled. Where all requests run and need no memory again, all
    continue, and nothing depends on their order or their memory: these queues come last."""
    waits = which if FORMS[preset.form].renews else which[~candidates.is_running[at]]
    asks = np.bincount(waits, minlength=len(workers)) > 0
    if asks.all():
        return _fill(candidates, workers, at, which, forecasts, preset, rng)
    asked = asks[which]
    at_rest, which_rest = at[~asked], which[~asked]
    limits = _limits(candidates, workers, at_rest, which_rest, preset)
    filled = FillResult.all_run(len(at_rest), len(workers))
    rest = _FilledQueues(workers, at_rest, which_rest, limits, filled)
    if not asked.any():
        return rest
    some, of = tuple(compress(workers, asks)), (asks.cumsum() - 1)[which[asked]]
    own = _fill(candidates, some, at[asked], of, forecasts, preset, rng)
    return rest.joined(own, asks.nonzero()[0])


def _fill(
    candidates: Candidates,
    workers: _Workers,
    at: Ints,
    which: Ints,
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> _FilledQueues:
    """Fills queues of which none is empty. O(jobs log jobs)."""
    waiting_last = np.arange(len(at)) + len(at) * ~candidates.is_running[at]
    order = sorted_order(candidates.queue_key[at], waiting_last)
    at = at[order[stable_order(which[order])]]
    limits = _limits(candidates, workers, at, which, preset)
    jobs, is_running = candidates.jobs.select(at), candidates.is_running[at]
    here = jobs.home == _numbers(workers)[which]
    away = (~here).nonzero()[0]
    if (jobs.held[away] | jobs.blocks[away]).any():  # KV elsewhere does not count here
        held, blocks = np.where(here, jobs.held, 0), np.where(here, jobs.blocks, 0)
        jobs = jobs.replaced(held=held, blocks=blocks)
    held_fast = RESIDENCIES[preset.residency].held_fast
    lines = Lines(np.arange(len(at)), which, np.bincount(which, minlength=len(workers)))
    slots = np.array([worker.max_running for worker in workers])
    # A queue is filled from its front: no waiting request behind as many as there are slots runs.
    in_reach = held_fast | is_running | (lines.nth <= slots[which])
    tables = forecasts, candidates.numbers
    queues = WorkerQueues(jobs, is_running, limits, workers, lines, *tables, in_reach)
    demand = FORMS[preset.form].demand(queues, preset.params, rng)
    first = lines.first(~is_running)  # waiting request, if one waits
    first = lines.starts + np.where(first < lines.sizes, first, 0)
    alone = jobs.longest_at(first) <= np.array([worker.kv_tokens for worker in workers])
    if held_fast:
        holds = is_running | (candidates.is_paused_with_kv()[at] & here)
        filled = fill_slots(lines, is_running, holds, demand, slots, alone)
    else:
        filled = fill(lines, is_running, demand, slots, alone)
    return _FilledQueues(workers, at, which, limits, filled)


def _limits(
    candidates: Candidates, workers: _Workers, at: Ints, which: Ints, preset: Preset
) -> Ints:
    return SLICES[preset.slice].limits(candidates, _numbers(workers)[which], at, preset.params)


def _numbers(workers: _Workers) -> Ints:
    return np.array([worker.number for worker in workers], np.int64)


def _explain(candidates: Candidates, assigned: Ints, queues: _FilledQueues) -> WaitExplanations:
    """The explanation of every waiting request."""
    unassigned = (assigned == NOWHERE).nonzero()[0]
    nowhere = explain_all(candidates, unassigned, WaitReason.NO_WORKER)
    held = (assigned == WAITS_FOR_ADAPTER).nonzero()[0]
    if len(held):
        reasons = np.full(len(held), WaitReason.ADAPTER_SLOTS, np.int64)
        used = slots_in_use(candidates, held)
        held_back = WaitExplanations(candidates.rows[held], reasons, *used)
        nowhere = WaitExplanations.concatenate([nowhere, held_back])
    waits = (~candidates.is_running[queues.at]).nonzero()[0]
    filled = queues.filled.select(waits)
    columns = filled.reasons, filled.first_values, filled.second_values
    waiting = WaitExplanations(candidates.rows[queues.at[waits]], *columns)
    return WaitExplanations.concatenate([nowhere, waiting])
