"""Order → place → form: fills each worker's queue, running requests included, while memory
lasts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress

import numpy as np

from services.forecast import Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.results import WorkerPart, explain_all, worker_decisions
from services.policies.decision import Decision, WaitExplanations, WaitReason
from services.policies.form.demand import WorkerQueues
from services.policies.form.fill import FillResult, fill, fill_slots
from services.policies.form.registry import FORMS
from services.policies.interval import INTERVALS
from services.policies.order.ranking import sorted_order
from services.policies.place.adapters import WAITS_FOR_ADAPTER, AdapterSlots, slots_in_use
from services.policies.place.eligibility import can_serve
from services.policies.place.placements import PLACEMENTS
from services.policies.preset import RESIDENCIES, Preset
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Bools, Candidates, WorkerSnapshot, stable_order

_Place = tuple[WorkerSnapshot, Ints]  # a worker and candidate positions


@dataclass(frozen=True, slots=True)
class _FilledQueue:
    """A worker's queue: candidate positions in order, and the result of filling it, parallel to
    them."""

    worker: WorkerSnapshot
    at: Ints
    limits: Ints
    filled: FillResult

    @property
    def part(self) -> WorkerPart:
        runs_next, peak = self.filled.runs_next, self.filled.peak
        return WorkerPart(self.worker.number, self.at, self.limits, runs_next, peak)

    def select(self, kept: Bools) -> "_FilledQueue":
        at, limits = self.at[kept], self.limits[kept]
        return _FilledQueue(self.worker, at, limits, self.filled.select(kept))


def arrange_continuous(
    candidates: Candidates, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """One decision for each worker."""

    def fill_queues(places: Sequence[_Place]) -> list[_FilledQueue]:
        return _fill_queues(candidates, places, forecasts, preset, rng)

    place = PLACEMENTS[preset.place]
    assigned = place.assign(candidates, preset.params)
    here = candidates.at_each_worker(assigned)
    queues = fill_queues(list(zip(candidates.workers, here, strict=True)))
    if not place.by_turn:
        assigned = _assign_to_idle(candidates, assigned, queues, fill_queues)
    not_before_s = INTERVALS[preset.interval].ends(candidates, preset.params)
    return Decision(
        candidates.round,
        worker_decisions(candidates, preset, [queue.part for queue in queues]),
        _explain(candidates, assigned, queues),
        candidates.rows,
        candidates.jobs.serial,
        not_before_s if not_before_s > candidates.now else np.inf,
        not_before_s,
    )


def _assign_to_idle(
    candidates: Candidates,
    assigned: Ints,
    queues: list[_FilledQueue],
    fill_queues: Callable[[Sequence[_Place]], list[_FilledQueue]],
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
        spare = AdapterSlots(candidates, assigned).admit(spare, i)
        spare = spare[: idle.worker.max_running]
        if not len(spare):
            continue
        (tried,) = fill_queues([(idle.worker, np.concatenate([idle.at, spare]))])
        runs_next = tried.filled.runs_next
        free[tried.at[runs_next]] = False
        assigned[tried.at[runs_next]] = idle.worker.number
        queues[i] = tried.select(assigned[tried.at] == idle.worker.number)
        for j, other in enumerate(queues):
            stays = assigned[other.at] == other.worker.number
            if not stays.all():
                queues[j] = other.select(stays)
    return assigned


def _fill_queues(
    candidates: Candidates,
    places: Sequence[_Place],
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> list[_FilledQueue]:
    """These workers' queues, filled: where all run and need no memory again, all continue, and
    nothing depends on their order. The memory of the others is computed together."""
    form, runs = FORMS[preset.form], candidates.is_running
    asks = [bool(len(at)) and (form.renews or not runs[at].all()) for _, at in places]
    stays = [not asked for asked in asks]
    filled = iter(_fill(candidates, list(compress(places, asks)), forecasts, preset, rng))
    unchanged = iter(_continue(candidates, list(compress(places, stays)), preset))
    return [next(filled if asked else unchanged) for asked in asks]


def _continue(
    candidates: Candidates, places: Sequence[_Place], preset: Preset
) -> list[_FilledQueue]:
    """Queues of running requests, all of which continue."""
    if not places:
        return []
    sizes = [len(at) for _, at in places]
    homes = np.array([worker.number for worker, _ in places]).repeat(sizes)
    every = np.concatenate([at for _, at in places])
    limits = SLICES[preset.slice].limits(candidates, homes, every, preset.params)
    found, first = [], 0
    for (worker, at), size in zip(places, sizes, strict=True):
        nothing = np.zeros(size)
        filled = FillResult(np.ones(size, bool), np.zeros(size, np.int64), nothing, nothing, 0.0)
        found.append(_FilledQueue(worker, at, limits[first : first + size], filled))
        first += size
    return found


def _fill(
    candidates: Candidates,
    places: Sequence[_Place],
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> list[_FilledQueue]:
    if not places:
        return []
    workers = tuple(worker for worker, _ in places)
    sizes = np.array([len(at) for _, at in places])
    which = np.arange(len(places)).repeat(sizes)
    at = np.concatenate([at for _, at in places])
    waiting_last = np.arange(len(at)) + len(at) * ~candidates.is_running[at]
    order = sorted_order(candidates.queue_key[at], waiting_last)
    at = at[order[stable_order(which[order])]]
    jobs, is_running = candidates.jobs.select(at), candidates.is_running[at]
    homes = np.array([worker.number for worker in workers])[which]
    here = jobs.home == homes
    if (jobs.held[~here] | jobs.blocks[~here]).any():  # KV elsewhere does not count here
        held, blocks = np.where(here, jobs.held, 0), np.where(here, jobs.blocks, 0)
        jobs = jobs.replaced(held=held, blocks=blocks)
    limits = SLICES[preset.slice].limits(candidates, homes, at, preset.params)
    held_fast = RESIDENCIES[preset.residency].held_fast
    # A queue is filled from its front: no waiting request behind as many as there are slots runs.
    slots = np.array([worker.max_running for worker in workers])
    in_reach = held_fast | is_running | (_nth_of_each(sizes) <= slots[which])
    tables = forecasts, candidates.numbers
    queues = WorkerQueues(jobs, is_running, limits, workers, sizes, *tables, in_reach)
    demands = FORMS[preset.form].demands(queues, preset.params, rng)
    holds = is_running | (candidates.is_paused_with_kv()[at] & here) if held_fast else is_running
    longest = jobs.longest
    found, first = [], 0
    for worker, size, demand in zip(workers, sizes.tolist(), demands, strict=True):
        part = slice(first, first + size)
        runs = is_running[part]
        alone = bool(longest[first + int(runs.argmin())] <= worker.kv_tokens)
        if held_fast:
            filled = fill_slots(runs, holds[part], demand, worker.max_running, alone)
        else:
            filled = fill(runs, demand, worker.max_running, alone)
        found.append(_FilledQueue(worker, at[part], limits[part], filled))
        first += size
    return found


def _nth_of_each(sizes: Ints) -> Ints:
    """The positions in each of the parts of these sizes, from 0 on."""
    return np.arange(sizes.sum()) - (sizes.cumsum() - sizes).repeat(sizes)


def _explain(
    candidates: Candidates, assigned: Ints, queues: Sequence[_FilledQueue]
) -> WaitExplanations:
    """The explanation of every waiting request."""
    unassigned = (assigned == NOWHERE).nonzero()[0]
    nowhere = explain_all(candidates, unassigned, WaitReason.NO_WORKER)
    held = (assigned == WAITS_FOR_ADAPTER).nonzero()[0]
    held_back = WaitExplanations(
        candidates.rows[held],
        np.full(len(held), WaitReason.ADAPTER_SLOTS, np.int64),
        *slots_in_use(candidates, held),
    )
    if not queues:
        return nowhere
    at = np.concatenate([queue.at for queue in queues])
    waits = (~candidates.is_running[at]).nonzero()[0]
    results = [queue.filled for queue in queues]
    columns = (
        np.concatenate([getattr(filled, name) for filled in results])[waits]
        for name in ("reasons", "first_values", "second_values")
    )
    waiting = WaitExplanations(candidates.rows[at[waits]], *columns)
    return WaitExplanations.concatenate([nowhere, held_back, waiting])
