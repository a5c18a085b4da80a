"""One decision a round: who runs next, where, and for how many tokens.

`decide` is a pure function of a frozen snapshot: order ranks everybody who waits or runs, `narrow`
keeps those who run or could, and `arrange` says what becomes of them, by the preset's
arrangement:

  continuous   order → place → form: each worker's line, its running in it with the rest, is
               filled while memory lasts
  batch        order → form → place: the pool is cut into batches, then given to workers

`arrange` needs a Contest alone, so that a batcher of its own can do it with the same result.
"""

from collections.abc import Callable

import numpy as np

from services.forecast import Floats, ForecastTable, Ints
from services.policies.decision import Decision, Reason, Share, Whys
from services.policies.form.batches import CUTS
from services.policies.form.demand import FORMS
from services.policies.form.fill import Filled, fill, fill_places
from services.policies.interval import INTERVALS
from services.policies.memory import Memory
from services.policies.order.orders import ORDERS
from services.policies.order.ranking import Ranking
from services.policies.place import PLACES
from services.policies.preset import RESIDENCIES, Preset
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Bools, Contest, Jobs, Snapshot, Worker
from services.policies.victim import VICTIMS


def decide(
    snapshot: Snapshot, preset: Preset, memory: Memory, rng: np.random.Generator, number: int = 0
) -> Decision:
    """The round's decision, with the memory for the next one. Equal inputs, equal decisions."""
    ranking = rank(snapshot, preset, memory)
    contest = narrow(snapshot, ranking, number)
    return complete(arrange(contest, snapshot.forecasts, preset, rng), ranking)


def rank(snapshot: Snapshot, preset: Preset, memory: Memory) -> Ranking:
    return ORDERS[preset.order].rank(snapshot, preset.params, memory)


def complete(decision: Decision, ranking: Ranking) -> Decision:
    """What the order adds to an arrangement: its memory, and when it next moves somebody."""
    return Decision(
        decision.round,
        decision.shares,
        decision.why,
        decision.rows,
        decision.serials,
        min(decision.next_s, ranking.next_s),
        decision.not_before_s,
        ranking.memory,
    )


def narrow(snapshot: Snapshot, ranking: Ranking, number: int) -> Contest:
    """The running, and of those who wait the most urgent, as far as places and memory could
    reach: of each model, and of each length that only some of its workers can hold, so that a
    long queue for one never starves another's workers. O(waiting), vectorised; only those that
    are kept are sorted."""
    split = ranking.split
    serial = snapshot.jobs.serial
    chosen = [np.arange(split, len(ranking.rows))]
    if split and snapshot.workers:
        chosen += _heads(snapshot, ranking)
    picked = np.concatenate(chosen)
    picked = picked[np.lexsort((serial[ranking.rows[picked]], ranking.key[picked]))]
    rows = ranking.rows[picked]
    return Contest(
        number,
        snapshot.now,
        rows,
        picked >= split,
        ranking.key[picked],
        ranking.line[picked],
        snapshot.jobs.take(rows),
        snapshot.workers,
    )


def _heads(snapshot: Snapshot, ranking: Ranking) -> list[Ints]:
    """Positions among the queued: a head for each kind of worker that could take them."""
    jobs, queued = snapshot.jobs, ranking.queued
    home, held = jobs.home[queued], jobs.held[queued]
    model, reach = jobs.model[queued], jobs.prompt[queued] + jobs.cap[queued]
    resting = (home != NOWHERE) & (held > 0)
    heads = []
    for worker in snapshot.workers:
        here = np.flatnonzero(resting & (home == worker.number)) if resting.any() else home[:0]
        heads.append(_head(snapshot, ranking, here, (worker,)))
    for name in {worker.model for worker in snapshot.workers}:
        serving = [worker for worker in snapshot.workers if worker.model == name]
        shorter = 0
        for longest in sorted({worker.reach_tokens for worker in serving}):
            able = tuple(worker for worker in serving if worker.reach_tokens >= longest)
            kind = ~resting & (model == name) & (reach > shorter) & (reach <= longest)
            heads.append(_head(snapshot, ranking, np.flatnonzero(kind), able))
            shorter = longest
    return heads


def _head(snapshot: Snapshot, ranking: Ranking, at: Ints, workers: tuple[Worker, ...]) -> Ints:
    """The most urgent of these, no more than have places, or would fit if they never grew; and
    one beyond, which says why it waits."""
    most = sum(worker.places for worker in workers) + 1
    at = _first(at, ranking.key[at], snapshot.jobs.serial[ranking.queued[at]], most)
    rows = ranking.queued[at]
    order = np.lexsort((snapshot.jobs.serial[rows], ranking.key[at]))
    room = sum(worker.room_tokens for worker in workers)
    jobs = snapshot.jobs
    totals = np.cumsum(jobs.prompt[rows[order]] + jobs.output[rows[order]])
    return at[order[: int(np.searchsorted(totals, room, side="right")) + 1]]


def _first(at: Ints, key: Floats, serial: Ints, most: int) -> Ints:
    """So many of these, by key and among equals by serial, in no order. O(rows)."""
    if len(at) <= most:
        return at
    last = np.partition(key, most - 1)[most - 1]
    before, tied = at[key < last], np.flatnonzero(key == last)
    most -= len(before)
    if len(tied) > most:
        tied = tied[np.argpartition(serial[tied], most - 1)[:most]]
    return np.concatenate([before, at[tied]])


def arrange(
    contest: Contest, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """What becomes of those who run or could."""
    shares, why = ARRANGEMENTS[preset.arrangement](contest, forecasts, preset, rng)
    not_before_s = INTERVALS[preset.interval](contest, preset.params)
    next_s = not_before_s if not_before_s > contest.now else np.inf
    return Decision(
        contest.round, shares, why, contest.rows, contest.jobs.serial, next_s, not_before_s
    )


Arranged = tuple[tuple[Share, ...], Whys]


def _continuous(
    contest: Contest, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Arranged:
    at = PLACES[preset.place](contest)
    shares, whys = [], [_whys(contest, np.flatnonzero(at == NOWHERE), Reason.NO_WORKER)]
    for worker in contest.workers:
        line = np.flatnonzero(at == worker.number)
        line = line[np.lexsort((~contest.runs[line], contest.line[line]))]
        jobs, runs = contest.jobs.take(line), contest.runs[line]
        if not runs.all():
            filled = _filled(contest, worker, line, jobs, forecasts, preset, rng)
            waits = ~runs
            whys.append(
                Whys(
                    contest.rows[line[waits]],
                    filled.reasons[waits],
                    filled.a[waits],
                    filled.b[waits],
                )
            )
            shares.append(_share(contest, worker, preset, line, filled.run, filled.peak))
        else:
            shares.append(_share(contest, worker, preset, line, runs, 0.0))
    return tuple(shares), Whys.joined(whys)


def _filled(
    contest: Contest,
    worker: Worker,
    line: Ints,
    jobs: Jobs,
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> Filled:
    runs = contest.runs[line]
    demand = FORMS[preset.form](jobs, worker, forecasts, preset.params, rng)
    first = int(np.argmin(runs))
    alone = bool(jobs.prompt[first] + jobs.cap[first] <= worker.kv_tokens)
    if RESIDENCIES[preset.residency].held_fast:
        return fill_places(runs, runs | contest.resting()[line], demand, worker.places, alone)
    return fill(runs, demand, worker.places, alone)


def _share(
    contest: Contest,
    worker: Worker,
    preset: Preset,
    line: Ints,
    run: Bools,
    peak: float,
) -> Share:
    """`line` may stand in any order; who runs is told the most urgent first."""
    next_ones = np.sort(line[run])  # contests are sorted by urgency
    jobs = contest.jobs.take(next_ones)
    runs = contest.runs[next_ones]
    limits = SLICES[preset.slice](jobs, runs, preset.params)
    evict = VICTIMS[preset.victim](jobs, runs, contest.key[next_ones])
    paused = line[contest.runs[line] & ~run]
    rows = contest.rows
    return Share(worker.number, rows[next_ones], limits, rows[paused], rows[next_ones[evict]], peak)


def _batch(
    contest: Contest, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Arranged:
    """The pool cut into batches, and these given to workers that have none, the fastest first;
    nobody joins a batch that runs. Each worker's batch is cut from what it could hold: beside
    small workers, who fits only the large one is not passed over."""
    jobs, runs = contest.jobs, contest.runs
    lines = {w.number: np.flatnonzero(runs & (jobs.home == w.number)) for w in contest.workers}
    idle = sorted(
        (worker for worker in contest.workers if not len(lines[worker.number])),
        key=lambda worker: -worker.full_speed,
    )
    free = ~runs
    reach = jobs.prompt + jobs.cap
    for worker in idle:
        able = free & (jobs.model == worker.model) & (reach <= worker.reach_tokens)
        batch = next(CUTS[preset.form](contest, np.flatnonzero(able), worker, preset.params), None)
        if batch is not None:
            lines[worker.number] = batch
            free[batch] = False
    shares = tuple(
        _share(contest, worker, preset, line, np.ones(len(line), bool), 0.0)
        for worker, line in ((worker, lines[worker.number]) for worker in contest.workers)
    )
    return shares, Whys.joined(
        [
            _whys(contest, np.flatnonzero(~runs & ~free), Reason.ADMITTED),
            _whys(contest, np.flatnonzero(free), Reason.IN_BATCH),
        ]
    )


def _whys(contest: Contest, at: Ints, reason: Reason) -> Whys:
    nothing: Floats = np.zeros(len(at))
    return Whys(contest.rows[at], np.full(len(at), reason, np.int64), nothing, nothing)


Arrangement = Callable[[Contest, ForecastTable, Preset, np.random.Generator], Arranged]
ARRANGEMENTS: dict[str, Arrangement] = {"continuous": _continuous, "batch": _batch}
