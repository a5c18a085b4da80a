"""ALISE's priority queues: shortest remaining time first, with ageing and demotion.

papers/001 §3.1, "Preemptive Scheduling". Level i holds what still takes at most base·2^i seconds,
the last level all the rest; within a level the shorter goes first. Who outlives its promised
length L̂ has L̂ doubled and moves down one. Who has waited `ageing_s` moves up one, once: ageing
that went on would bring everybody to the top of a system that stays overloaded, and the order
would be arrival's again.

One queue up ends nobody's starvation, so who has waited for as long as ageing through every queue
would take (`levels` · `ageing_s`) is starved, until it has ended, and may go to the FRONT, the
oldest first, one a worker at a time. That bound overload can't exhaust: it costs the others one
place, and whoever is starved comes there in the end: behind k older ones after k of them have been
served. Who is at the FRONT stays until it has ended or lost its KV, and makes way for nobody.
"""

from collections.abc import Sequence
from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import Memory
from services.policies.order.pace import keep_pace
from services.policies.order.ranking import Ranking, sticky
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Jobs, Snapshot, Worker

LEVEL = 1e7  # seconds; keys of one level lie within it
PROMISED, FORESEEN = "promised", "foreseen"
DEMOTED, LIFTED, STARVED, FRONT = "demoted", "lifted", "starved", "front"
COLUMNS = (PROMISED, FORESEEN, DEMOTED, LIFTED, STARVED, FRONT)

PARAMS = {
    "levels": Param(8, 1, 32),
    "base_s": Param(0.02, 1e-6, 1e6),
    "ageing_s": Param(10.0, 1e-3, 1e6),
    "hysteresis": Param(0.25, 0.0, inf),
}


def alise(snapshot: Snapshot, params: Params, memory: Memory) -> Ranking:
    """The order, and what it remembers of each job: its L̂, and how far it was moved.

    O(jobs), vectorised. A running job is passed in the line by one of a better level that needs
    less time by a share of `hysteresis`, so that near-equal ones do not trade places; infinite:
    by nobody. One that has nothing in KV yet has only just come, and is not passed either.
    """
    rows = np.concatenate([snapshot.queued, snapshot.running])
    jobs, split = snapshot.jobs, len(snapshot.queued)
    serials, output, cap = jobs.serial[rows], jobs.output[rows], jobs.cap[rows]
    pace, memory = keep_pace(snapshot, memory)
    promised, foreseen, demoted, lifted, was_starved, was_front = memory.recall(
        COLUMNS, rows, serials
    )

    told_anew = foreseen != jobs.forecast[rows] + 1  # a better forecast is a new promise
    promised = np.where(told_anew, np.minimum(cap, jobs.total[rows]), promised)
    promised, demoted, lifted = _outlived(output, cap, promised, demoted, lifted)
    waited_s = snapshot.now - jobs.since_s[rows]
    waited_s[split:] = -inf
    lifted = np.maximum(lifted, waited_s >= params["ageing_s"])
    starved_s = params["levels"] * params["ageing_s"]
    starved = (was_starved > 0) | (waited_s >= starved_s)
    front = was_front > 0
    if starved.any():
        front = _to_front(front, starved, jobs.take(rows), split, snapshot.workers)

    remaining_s = pace.remaining_s(jobs, rows, promised - output)
    moved = demoted - lifted
    levels = _levels(remaining_s, moved, params)
    key = _key(levels, remaining_s, front, snapshot.now - jobs.arrival_s[rows])
    line = _line(key, levels, remaining_s, moved, split, params)
    stays = front[split:] | (jobs.held[snapshot.running] == 0)
    line[split:][stays] = -inf
    crowded = bool((starved & ~front)[:split].any())  # time alone brings nobody to the front
    lift_s = np.where(front, 0.0, inf if crowded else np.maximum(0.0, starved_s - waited_s))
    columns = (promised, jobs.forecast[rows] + 1.0, demoted, lifted, starved, front)
    kept = {name: values.astype(float) for name, values in zip(COLUMNS, columns, strict=True)}
    memory = memory.with_columns(rows, serials, **kept)
    next_s = _next_s(snapshot.now, waited_s[:split], lifted[:split], front, starved_s, params)
    return Ranking(rows, split, key, line, remaining_s, lift_s, next_s, memory)


def _outlived(
    output: Ints, cap: Ints, promised: Floats, demoted: Floats, lifted: Floats
) -> tuple[Floats, Floats, Floats]:
    """L̂ doubled as often as it was outlived, one queue down each time, from where it belongs."""
    while True:
        late = (promised <= output) & (promised < cap)
        if not late.any():
            return promised, demoted, lifted
        promised = np.where(late, np.minimum(2 * promised, cap), promised)
        demoted = demoted + late
        lifted = np.where(late, 0.0, lifted)


def _to_front(
    front: Bools, starved: Bools, jobs: Jobs, split: int, workers: Sequence[Worker]
) -> Bools:
    """Who runs at the front, or rests, keeps its worker's seat. The others go to the starved, the
    oldest first: each worker's to one that rests there; and as nobody knows yet where one without
    KV will be placed, that one comes in when all seats of its model are empty. It is not passed by
    younger ones meanwhile. O(jobs · workers)."""
    placed = jobs.held > 0
    placed[split:] = True
    front = front & placed
    waiting = starved & ~front
    waiting[split:] = False
    if not waiting.any():
        return front
    for model in {worker.model for worker in workers}:
        among = waiting & (jobs.model == model)
        roaming = _oldest(among & ~placed, jobs)
        taken = set(jobs.home[front].tolist())
        here = [worker.number for worker in workers if worker.model == model]
        for number in here:
            oldest = (
                None if number in taken else _oldest(among & placed & (jobs.home == number), jobs)
            )
            if oldest is not None and (roaming is None or _older(jobs, oldest, roaming)):
                front[oldest] = True
                taken.add(number)
        if roaming is not None and taken.isdisjoint(here):
            front[roaming] = True
    return front


def _oldest(among: Bools, jobs: Jobs) -> int | None:
    at = np.flatnonzero(among)
    return int(at[np.lexsort((jobs.serial[at], jobs.arrival_s[at]))[0]]) if len(at) else None


def _older(jobs: Jobs, one: int, other: int) -> bool:
    return bool(jobs.arrival_s[one] <= jobs.arrival_s[other])


def _levels(remaining_s: Floats, moved: Floats, params: Params) -> Floats:
    """The queue that a remaining time belongs to, moved; never out of the queues there are."""
    own = np.ceil(np.log2(np.maximum(remaining_s / params["base_s"], 1e-9)))
    last = params["levels"] - 1
    return np.clip(np.clip(own, 0, last) + moved, 0, last)


def _key(levels: Floats, remaining_s: Floats, front: Bools, age_s: Floats) -> Floats:
    key = levels * LEVEL + np.minimum(remaining_s, LEVEL / 2)
    key[front] = -LEVEL / 2 - np.minimum(age_s[front], LEVEL / 4)
    return key


def _line(
    key: Floats, levels: Floats, remaining_s: Floats, moved: Floats, split: int, params: Params
) -> Floats:
    """Whoever is ahead of where a running job would stand if it needed less by the hysteresis,
    and of a better level than it has, stands ahead of it."""
    if np.isinf(params["hysteresis"]):
        return sticky(key, split)
    line = key.copy()
    shorter_s = remaining_s[split:] / (1 + params["hysteresis"])
    passed = _levels(shorter_s, moved[split:], params) * LEVEL + shorter_s
    line[split:] = np.minimum(passed, levels[split:] * LEVEL)
    return line


def _next_s(
    now: float,
    waited_s: Floats,
    lifted: Floats,
    front: Bools,
    starved_s: float,
    params: Params,
) -> float:
    """When ageing next moves somebody who waits; infinite when all have been moved."""
    due_s = np.where(lifted > 0, starved_s, params["ageing_s"]) - waited_s
    due_s = due_s[(due_s > 0) & ~front[: len(due_s)]]
    return now + float(due_s.min()) if len(due_s) else inf
