"""The fixed inputs of a batch round, and what it derives from them and a BatchState."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.arrange.batch_placement import BATCH_PLACEMENTS, Assign
from services.policies.arrange.batch_state import BatchState
from services.policies.estimate import ESTIMATES
from services.policies.form.batch_cuts import CUTS, BatchCut
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.interval import INTERVALS, Interval
from services.policies.order.registry import ORDERS
from services.policies.preset import Preset
from services.policies.slice import SLICES
from services.policies.snapshot import Bools, Candidates, WorkerSnapshot


@dataclass(frozen=True)
class BatchRound:
    """`able`, (workers, rows), marks the requests that a worker can serve alone. `running` holds,
    for each worker, the positions that run there and are not paused. `fastest` are worker indices
    by falling speed. `assign` is None where batches wait for any worker."""

    candidates: Candidates
    preset: Preset
    cut: BatchCut
    assign: Assign | None
    interval: Interval
    sizes: Sizes
    rooms: tuple[Room, ...]
    able: Bools
    running: tuple[Ints, ...]
    fastest: tuple[int, ...]

    @property
    def workers(self) -> tuple[WorkerSnapshot, ...]:
        return self.candidates.workers

    @property
    def priority(self) -> Ints:
        return self.candidates.jobs.priority

    @property
    def batch_key(self) -> Callable[[Floats, Floats], Floats] | None:
        """The order's key of a batch; None where a batch is as urgent as its first member."""
        return ORDERS[self.preset.order].batch_key


def prepare_round(candidates: Candidates, preset: Preset, state: BatchState) -> BatchRound:
    workers, home = candidates.workers, candidates.jobs.home
    cut = CUTS[preset.form]
    stays = candidates.is_running & ~state.paused
    return BatchRound(
        candidates,
        preset,
        cut,
        BATCH_PLACEMENTS[preset.place].assign,
        INTERVALS[preset.interval],
        _sizes(candidates, preset, cut.uses_forecast),
        tuple(cut.room(worker, preset.params) for worker in workers),
        np.array([_able(candidates, worker) for worker in workers]),
        tuple(np.flatnonzero(stays & (home == worker.number)) for worker in workers),
        tuple(sorted(range(len(workers)), key=lambda i: -workers[i].full_speed)),
    )


def waiting(batch_round: BatchRound, state: BatchState) -> Bools:
    """Requests that neither run nor were sent."""
    return ~batch_round.candidates.is_running & ~state.sent


def pooled(batch_round: BatchRound, state: BatchState) -> Ints:
    """Waiting requests that are in no batch and that some worker can serve."""
    free = waiting(batch_round, state) & (state.batch == 0)
    return np.flatnonzero(free & batch_round.able.any(axis=0))


def waiting_batches(batch_round: BatchRound, state: BatchState) -> Batches:
    """Batches that wait as a whole, without those of which a member still runs."""
    ready = waiting(batch_round, state) & (state.batch > 0)
    if state.paused.any():
        ready &= ~np.isin(state.batch, state.batch[batch_round.candidates.is_running])
    return group(batch_round, np.flatnonzero(ready), state.batch)


def group(batch_round: BatchRound, at: Ints, batch: Ints) -> Batches:
    """The positions `at` grouped by their value of the column `batch`."""
    return Batches.group(at, batch[at], batch_round.sizes)


def as_one_batch(batch_round: BatchRound, at: Ints) -> Batches:
    return Batches.group(at, np.ones(len(at), np.int64), batch_round.sizes)


def idle_workers(batch_round: BatchRound, state: BatchState) -> list[int]:
    """Indices of workers that run nothing and begin nothing, by falling speed."""
    free = (
        i for i in batch_round.fastest if not len(batch_round.running[i]) and i not in state.begins
    )
    return [i for i in free if batch_round.workers[i].max_running > 0]


def estimate_s(batch_round: BatchRound, worker: WorkerSnapshot, batches: Batches) -> Floats:
    """Seconds that each batch takes at this worker."""
    columns = (batches.size, batches.length, batches.expected)
    estimate = ESTIMATES[batch_round.preset.estimator]
    return estimate(worker.cost, *(column.astype(float) for column in columns))


def serveable(batch_round: BatchRound, batches: Batches) -> Bools:
    """(workers, batches): whether the worker can serve the whole batch."""
    if not len(batches):
        return np.zeros((len(batch_round.workers), 0), bool)
    able = batch_round.able[:, batches.members]
    fits = [
        room.fits_each(batches.size, batches.length, batches.max_output)
        for room in batch_round.rooms
    ]
    could: Bools = np.logical_and.reduceat(able, batches.starts, axis=1) & np.array(fits)
    return could


def loads_s(batch_round: BatchRound, state: BatchState) -> Floats:
    """Estimated seconds of work at each worker: what it runs and what is assigned to it."""
    loads = np.zeros(len(batch_round.workers))
    waits = ~batch_round.candidates.is_running & (state.worker > 0)
    at = np.flatnonzero(waits & (state.batch > 0))
    heads = at[np.unique(state.batch[at], return_index=True)[1]]  # one member a batch
    items = np.concatenate([heads, np.flatnonzero(waits & (state.batch == 0))])
    for i, (worker, here) in enumerate(zip(batch_round.workers, batch_round.running, strict=True)):
        loads[i] = np.sum(state.serve_s[items[state.worker[items] == worker.number]])
        if len(here):
            known_s = float(state.serve_s[here].max())
            adopted = as_one_batch(batch_round, here)
            loads[i] += known_s or float(estimate_s(batch_round, worker, adopted)[0])
    return loads


def by_urgency(batch_round: BatchRound, batches: Batches, worker: WorkerSnapshot) -> Ints:
    """Batch indices in order of urgency: by the order's key of a batch at this worker, if it has
    one, then by the most urgent member."""
    first = batches.members[batches.starts]
    if batch_round.batch_key is None:
        return np.argsort(first, kind="stable")
    candidates = batch_round.candidates
    oldest_s = batches.min_values(candidates.jobs.arrival_s)
    wait_s = np.maximum(0.0, candidates.now - oldest_s)
    key = batch_round.batch_key(wait_s, estimate_s(batch_round, worker, batches))
    return np.lexsort((first, key, batch_round.priority[first]))


def _able(candidates: Candidates, worker: WorkerSnapshot) -> Bools:
    jobs = candidates.jobs
    return worker.can_run(jobs.model, jobs.longest) & (worker.max_running > 0)


def _sizes(candidates: Candidates, preset: Preset, uses_forecast: bool) -> Sizes:
    """Whole tokens, at least 1."""
    jobs, every = candidates.jobs, np.arange(len(candidates.rows))
    limits = SLICES[preset.slice].limits(
        candidates, candidates.workers[0].number, every, preset.params
    )
    most = np.maximum(limits - jobs.output, 1)
    expected = np.clip(np.ceil(jobs.expected_remaining).astype(np.int64), 1, most)
    return Sizes(jobs.context, expected if uses_forecast else most, expected)
