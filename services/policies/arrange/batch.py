"""Order → form → place: the pool is cut into batches, then given to workers.

A worker runs one batch at a time. A batch ends when no member runs any more: all have finished, or,
where slices return, all have used up their slice; unfinished members go back to the pool. The
preset decides when the pool is cut:

  inserting cuts    on arrival: a request joins a batch that waits for a worker
  forming ahead     at the interval's times; the batches then wait for their workers
  else              when a worker is idle; what it does not take stays in the pool

Placements that assign a worker do so when batches form, or for single requests where nothing is
formed ahead. A batch has one priority; otherwise requests of a later priority would run ahead.
"""

from dataclasses import dataclass

import numpy as np

from services.forecast import Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.batch_dispatch import (
    assign_requests,
    cut_for_idle,
    form_batches,
    send_formed,
)
from services.policies.arrange.batch_round import (
    BatchRound,
    by_urgency,
    group,
    loads_s,
    pooled,
    prepare_round,
    waiting,
)
from services.policies.arrange.batch_state import (
    LAST_ID,
    LAST_WORKER,
    NOTES,
    BatchState,
    recall_state,
)
from services.policies.arrange.results import WorkerParts, explain_all, worker_decisions
from services.policies.decision import Decision, WaitExplanations, WaitReason
from services.policies.form.batch_cuts import CUTS
from services.policies.form.pool import Batches
from services.policies.preset import Preset
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Candidates

__all__ = ["NOTES", "arrange_batches"]

UNTIL = "batch_until_s"  # before this no batch forms ahead, unless every worker is idle
POSTPONED = "batch_postponed"  # whether the last round postponed cutting


@dataclass(frozen=True, slots=True)
class _Timing:
    """`until_s` is when batches next form ahead. `postpones`: requests return to the pool in this
    round, so cutting waits for the next one, which sees them; no two rounds in a row postpone."""

    until_s: float
    postpones: bool


def arrange_batches(
    candidates: Candidates, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """The decision for all candidates. O(n log n) plus the cut."""
    if not candidates.workers:
        waits = np.flatnonzero(~candidates.is_running)
        explained = explain_all(candidates, waits, WaitReason.NO_WORKER)
        return Decision(candidates.round, (), explained, candidates.rows, candidates.jobs.serial)
    cut = CUTS[preset.form]
    state = recall_state(candidates, SLICES[preset.slice].returns, cut.inserts)
    batch_round = prepare_round(candidates, preset, state)
    timing = _timing(batch_round, state)
    state, formed = _form(batch_round, state, timing)
    state = send_formed(batch_round, state)
    if not (cut.inserts or batch_round.interval.ahead or timing.postpones):
        state = cut_for_idle(batch_round, state)
    if formed:
        loads = loads_s(batch_round, state)
        until_s = batch_round.interval.after(candidates.now, loads, preset.params)
        timing = _Timing(until_s, timing.postpones)
    numbers = {
        LAST_ID: float(state.last_id),
        UNTIL: timing.until_s,
        LAST_WORKER: float(state.last_worker),
        POSTPONED: float(timing.postpones),
    }
    return Decision(
        candidates.round,
        worker_decisions(candidates, preset, _parts(batch_round, state)),
        _explanations(batch_round, state, timing),
        candidates.rows,
        candidates.jobs.serial,
        _next_s(batch_round, state, timing),
        candidates.now,
        numbers,
        state.notes(candidates),
    )


def _timing(batch_round: BatchRound, state: BatchState) -> _Timing:
    numbers = batch_round.candidates.numbers
    returned = bool(state.paused.any())
    postpones = returned and not batch_round.cut.inserts and not numbers.get(POSTPONED, 0.0)
    return _Timing(numbers.get(UNTIL, 0.0), postpones)


def _form(batch_round: BatchRound, state: BatchState, timing: _Timing) -> tuple[BatchState, bool]:
    """The state once the pool is formed or assigned as far as the preset does so now; and whether
    batches formed ahead of idle workers."""
    if batch_round.cut.inserts:
        return form_batches(batch_round, state), False
    if not batch_round.interval.ahead:
        return assign_requests(batch_round, state), False
    if not _due(batch_round, state, timing):
        return state, False
    formed = len(pooled(batch_round, state)) > 0
    return form_batches(batch_round, state), formed


def _due(batch_round: BatchRound, state: BatchState, timing: _Timing) -> bool:
    """Whether batches form ahead now: at their time, or when no worker has anything left to do."""
    batched = waiting(batch_round, state) & (state.batch > 0)
    idle = not any(len(here) for here in batch_round.running) and not batched.any()
    return not timing.postpones and (batch_round.candidates.now >= timing.until_s or idle)


def _parts(batch_round: BatchRound, state: BatchState) -> WorkerParts:
    candidates, preset = batch_round.candidates, batch_round.preset
    numbers = np.array([worker.number for worker in batch_round.workers], np.int64)
    index = candidates.indices_of(candidates.jobs.home)
    runs = (candidates.is_running & (index != NOWHERE)).nonzero()[0]
    begins = [state.begins.get(i, runs[:0]) for i in range(len(numbers))]
    sizes = [len(members) for members in begins]
    at = np.concatenate([runs, *begins])
    which = np.concatenate([index[runs], np.arange(len(numbers)).repeat(sizes)])
    runs_next = np.ones(len(at), bool)
    runs_next[: len(runs)] = ~state.paused[runs]
    limits = SLICES[preset.slice].limits(candidates, numbers[which], at, preset.params)
    lockstep = np.array(sizes) > 0 if preset.static else np.zeros(len(numbers), bool)
    peaks = np.zeros(len(numbers))
    return WorkerParts(numbers, at, which, limits, runs_next, peaks, lockstep)


def _next_s(batch_round: BatchRound, state: BatchState, timing: _Timing) -> float:
    """When time alone calls for a round: at once for requests that return to the pool now."""
    soon = float(np.nextafter(batch_round.candidates.now, np.inf))
    if state.paused.any():
        return soon
    ahead = batch_round.interval.ahead and not batch_round.cut.inserts
    if ahead and len(pooled(batch_round, state)):
        return max(timing.until_s, soon)
    return float("inf")


def _explanations(batch_round: BatchRound, state: BatchState, timing: _Timing) -> WaitExplanations:
    """The explanation of every waiting request."""
    candidates = batch_round.candidates
    reasons = np.full(len(candidates.rows), WaitReason.NO_WORKER, np.int64)
    first, second = np.zeros(len(reasons)), np.zeros(len(reasons))
    pool = pooled(batch_round, state)
    if batch_round.interval.ahead:
        reasons[pool] = WaitReason.CUT_SCHEDULED
        first[pool] = max(0.0, timing.until_s - candidates.now)
    else:
        reasons[pool], first[pool] = WaitReason.CUT_ON_IDLE, np.arange(len(pool))
    at = np.flatnonzero(waiting(batch_round, state) & (state.batch > 0))
    if len(at):
        batches = group(batch_round, at, state.batch)
        workers, which = batches.first_values(state.worker), batches.members
        assigned = np.repeat(workers > 0, batches.size)
        reasons[which] = np.where(assigned, WaitReason.ASSIGNED, WaitReason.IN_BATCH)
        first[which] = np.repeat(_batches_ahead(batch_round, batches, workers), batches.size)
        second[which] = np.repeat(np.where(workers > 0, workers, batches.size), batches.size)
    for i, members in state.begins.items():
        sizes = batch_round.sizes
        tokens = sizes.length[members].max() + sizes.max_output[members].max()
        reasons[members] = WaitReason.ADMITTED
        first[members], second[members] = len(members) * tokens, batch_round.rooms[i].tokens
    waits = ~candidates.is_running
    return WaitExplanations(candidates.rows[waits], reasons[waits], first[waits], second[waits])


def _batches_ahead(batch_round: BatchRound, batches: Batches, workers: Ints) -> Ints:
    """How many batches that wait for the same worker, or for any, are more urgent."""
    turn = np.zeros(len(batches), np.int64)
    turn[by_urgency(batch_round, batches, batch_round.workers[0])] = np.arange(len(batches))
    order = np.lexsort((turn, workers))
    begins = np.flatnonzero(np.diff(workers[order], prepend=-1))
    ahead = np.zeros(len(batches), np.int64)
    sizes = np.diff(begins, append=len(order))
    ahead[order] = np.arange(len(order)) - np.repeat(begins, sizes)
    return ahead
