"""One decision per round: which requests run next, where, and for how many tokens.

`decide` is a pure function of a frozen snapshot: the order ranks all requests within their
priority, `select_candidates` keeps those that run or could run, and `arrange` decides about them by
the preset's arrangement:

  continuous   order → place → form: each worker's queue, running requests included, is filled
               while memory lasts
  batch        order → form → place: the pool is cut into batches, then given to workers

`arrange` needs only the Candidates and forecasts, so a separate batcher gives the same result.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.batch import NOTES as BATCH_NOTES
from services.policies.arrange.batch import arrange_batches
from services.policies.arrange.continuous import arrange_continuous
from services.policies.cadence import measure_cadence
from services.policies.decision import Decision
from services.policies.form.registry import FORMS
from services.policies.interval import INTERVALS
from services.policies.memory import PolicyMemory
from services.policies.order.priority import rank_by_priority
from services.policies.order.ranking import Ranking, sorted_order
from services.policies.order.registry import ORDERS
from services.policies.place.loads import cached_tokens
from services.policies.preset import PLACEMENTS_BY_ARRANGEMENT, Preset
from services.policies.slice import SLICES
from services.policies.snapshot import (
    NOWHERE,
    Bools,
    Candidates,
    Snapshot,
    WorkerSnapshot,
    stable_order,
)

SAMPLED = 16  # one of so many values is in a sample
REFLECTIONS = {name: form.reflect for name, form in FORMS.items()}


def decide(
    snapshot: Snapshot,
    preset: Preset,
    memory: PolicyMemory,
    rng: np.random.Generator,
    round_number: int = 0,
) -> Decision:
    """The round's decision, with the memory for the next round. Deterministic in its inputs."""
    ranking = rank_requests(snapshot, preset, memory)
    candidates = select_candidates(snapshot, ranking, preset, round_number)
    return complete_decision(arrange(candidates, snapshot.forecasts, preset, rng), ranking)


def takes_turns(preset: Preset) -> bool:
    """Whether a round may decide about some of the workers: not where it divides a pool among all,
    or where the next one has to wait."""
    return not ARRANGEMENTS[preset.arrangement].pools and INTERVALS[preset.interval].wait_s is None


def is_settled(snapshot: Snapshot, preset: Preset) -> bool:
    """Whether an arrangement would leave every request and limit as it is: none is queued, each
    running one may finish its whole answer, and no worker is empty. O(running)."""
    jobs, running = snapshot.jobs, snapshot.running
    if len(snapshot.queued) or not takes_turns(preset) or FORMS[preset.form].renews:
        return False
    busy = set(jobs.home[running].tolist())
    whole = bool((jobs.limit[running] >= jobs.cap[running]).all())
    return whole and all(worker.number in busy for worker in snapshot.workers)


def rank_requests(snapshot: Snapshot, preset: Preset, memory: PolicyMemory) -> Ranking:
    """All requests in order, lower priority numbers first; the cadence and the form's feedback
    update the memory before."""
    memory = measure_cadence(snapshot, memory)
    reflect = REFLECTIONS.get(preset.form)
    if reflect:
        memory = reflect(snapshot, preset.params, memory)
    ranking = ORDERS[preset.order].rank(snapshot, preset.params, memory)
    return rank_by_priority(ranking, snapshot.jobs.priority)


def complete_decision(decision: Decision, ranking: Ranking) -> Decision:
    """The decision with the order's next event time, and the memory of both."""
    memory = ranking.memory.with_notes(decision.rows, decision.serials, decision.notes)
    return replace(
        decision,
        next_s=min(decision.next_s, ranking.next_s),
        memory=memory.with_numbers(**decision.numbers),
        ranking=ranking,
    )


def select_candidates(
    snapshot: Snapshot, ranking: Ranking, preset: Preset, round_number: int
) -> Candidates:
    """Requests that run or could run, in order.

    A batch arrangement considers all requests. A continuous one considers the requests that run at
    the deciding workers and the most urgent waiting ones that their slots and memory could admit,
    separately for each model and each length class of these workers, so that a long queue of one
    never starves another's workers, and apart from those that may wait for a slot of their LoRA
    adapter. O(waiting), vectorised; only the kept requests are sorted.
    """
    arrangement = ARRANGEMENTS[preset.arrangement]
    split = ranking.split
    if arrangement.pools:
        picked = np.arange(len(ranking.rows))
    else:
        picked = split + _runs_at_deciding(snapshot)
        if split and snapshot.workers:
            picked = np.concatenate([picked, *_heads(snapshot, ranking)])
    picked = picked[sorted_order(ranking.key[picked], snapshot.live.serial[picked])]
    rows, is_running = ranking.rows[picked], picked >= split
    key, queue_key = ranking.key[picked], ranking.queue_key[picked]
    jobs, memory = snapshot.jobs.select(rows), ranking.memory
    if SLICES[preset.slice].returns:
        queue_key = np.where(is_running & jobs.slice_exhausted, key, queue_key)
    notes = memory.notes.recall(arrangement.notes, rows, jobs.serial)
    return Candidates(
        round_number,
        snapshot.now,
        rows,
        is_running,
        key,
        queue_key,
        jobs,
        snapshot.deciding,
        cached_tokens(snapshot, rows, jobs) if _uses_cached(preset) else _NO_CACHED,
        memory.numbers,
        dict(zip(arrangement.notes, notes, strict=True)),
    )


def _uses_cached(preset: Preset) -> bool:
    return PLACEMENTS_BY_ARRANGEMENT[preset.arrangement][preset.place].cached


_NO_CACHED: Ints = np.zeros((0, 0), np.int64)


def _runs_at_deciding(snapshot: Snapshot) -> Ints:
    """Positions among the running requests: those at the deciding workers."""
    if not snapshot.turn:
        return np.arange(len(snapshot.running))
    numbers = [worker.number for worker in snapshot.turn]
    return np.isin(snapshot.jobs.home[snapshot.running], numbers).nonzero()[0]


def _heads(snapshot: Snapshot, ranking: Ranking) -> list[Ints]:
    """Positions among the queued: a queue head for each kind of worker."""
    jobs, queued = snapshot.live, slice(ranking.split)
    home, held, model = jobs.home[queued], jobs.held[queued], jobs.model[queued]
    reach = jobs.prompt[queued] + jobs.cap[queued]
    resting = (home != NOWHERE) & (held > 0)
    heads = []
    if resting.any():
        heads.append(_resting_heads(snapshot, ranking, resting.nonzero()[0]))
    near = _by_adapter(snapshot, jobs.adapter[queued])
    for name in {worker.model for worker in snapshot.deciding}:
        serving = [worker for worker in snapshot.deciding if worker.model == name]
        shorter = 0
        for longest in sorted({worker.reach_tokens for worker in serving}):
            able = tuple(worker for worker in serving if worker.reach_tokens >= longest)
            kind = ~resting & (model == name) & (reach > shorter) & (reach <= longest)
            heads += [_head(snapshot, ranking, (kind & each).nonzero()[0], able) for each in near]
            shorter = longest
    return heads


def _by_adapter(snapshot: Snapshot, adapter: Ints) -> list[Bools]:
    """Parts of the queued requests that do not hide each other: where workers have few slots for
    LoRA adapters, those without an adapter or with one in use, and the others."""
    if not any(worker.adapter_slots for worker in snapshot.deciding) or not adapter.any():
        return [np.ones(len(adapter), bool)]
    in_use = (adapter == 0) | np.isin(adapter, snapshot.jobs.adapter[snapshot.running])
    return [in_use, ~in_use]


def _resting_heads(snapshot: Snapshot, ranking: Ranking, at: Ints) -> Ints:
    """The `_head` of each deciding worker's waiting requests with KV there, for all of them
    together. O(at log at)."""
    jobs, numbers = snapshot.live, [worker.number for worker in snapshot.deciding]
    at = at[sorted_order(ranking.key[at], jobs.serial[at])]
    at = at[stable_order(jobs.home[at])]
    home, context = jobs.home[at], jobs.context[at]
    most, room = np.zeros((2, max(*numbers, int(home.max())) + 1), np.int64)
    most[numbers] = [worker.max_running + 1 for worker in snapshot.deciding]
    room[numbers] = [worker.room_tokens for worker in snapshot.deciding]
    first = home.searchsorted(home)
    before = context.cumsum() - context
    nth, ahead = np.arange(len(at)) - first, before - before[first]
    return at[(nth < most[home]) & (ahead <= room[home])]


def _head(
    snapshot: Snapshot, ranking: Ranking, at: Ints, workers: tuple[WorkerSnapshot, ...]
) -> Ints:
    """The most urgent of these that slots and memory could admit if none grew, and one more: its
    explanation says what is short."""
    most = sum(worker.max_running for worker in workers) + 1
    at = first_in_order(at, ranking.key[at], snapshot.live.serial[at], most)
    rows = ranking.queued[at]
    order = sorted_order(ranking.key[at], snapshot.jobs.serial[rows])
    room = sum(worker.room_tokens for worker in workers)
    jobs = snapshot.jobs
    totals = jobs.context_at(rows[order]).cumsum()
    return at[order[: int(totals.searchsorted(room, side="right")) + 1]]


def first_in_order(at: Ints, key: Floats, serial: Ints, most: int) -> Ints:
    """The `most` smallest by (key, serial), unsorted. O(rows)."""
    if len(at) <= most:
        return at
    last = _nth_smallest(key, most)
    before, tied = at[key < last], (key == last).nonzero()[0]
    most -= len(before)
    if len(tied) > most:
        serials = serial[tied]
        tied = tied[serials <= _nth_smallest(serials, most)]
    return np.concatenate([before, at[tied]])


def _nth_smallest(values: Floats | Ints, nth: int) -> float:
    """The `nth` smallest value, from 1 on. A sorted sample bounds it, so that few values are
    partitioned: numpy's partition is slow if many are equal, and none are partitioned then."""
    near = values
    if len(values) > 4 * nth:
        sample = np.sort(values[::SAMPLED])
        bound = sample[min(2 * nth // SAMPLED + 2, len(sample) - 1)]
        near = values[values < bound]
        if len(near) < nth <= np.count_nonzero(values <= bound):
            return float(bound)
    return float(np.partition(near if len(near) >= nth else values, nth - 1)[nth - 1])


def arrange(
    candidates: Candidates, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """The decision about the candidates."""
    return ARRANGEMENTS[preset.arrangement].arrange(candidates, forecasts, preset, rng)


@dataclass(frozen=True, slots=True)
class Arrangement:
    """`notes` are the columns it remembers; `pools`: it considers all waiting requests."""

    arrange: Callable[[Candidates, ForecastTable, Preset, np.random.Generator], Decision]
    notes: tuple[str, ...] = ()
    pools: bool = False


ARRANGEMENTS = {
    "continuous": Arrangement(arrange_continuous),
    "batch": Arrangement(arrange_batches, BATCH_NOTES, pools=True),
}
