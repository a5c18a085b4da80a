"""ALISE's priority queues: shortest remaining time first, with ageing and demotion.

papers/001 §3.1, "Preemptive Scheduling". Level i holds what still takes at most base·2^i seconds,
the last level all the rest; within a level the shorter goes first. Who outlives its promised
length L̂ has L̂ doubled and moves down one. Who has waited `ageing_s` moves up one, once: ageing
that went on would bring everybody to the top of a system that stays overloaded, and the order
would be arrival's again.

One queue up ends nobody's starvation, so who has waited for as long as ageing through every queue
would take (`levels` · `ageing_s`) may go to the FRONT, the longest waiting first, one a worker at
a time. That bound overload can't exhaust: it costs the others one place, and whoever waits comes
there in the end. Who is at the FRONT stays until it has ended, and makes way for nobody.
"""

from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import Memory
from services.policies.order.pace import keep_pace
from services.policies.order.ranking import Ranking, sticky
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Snapshot

LEVEL = 1e7  # seconds; keys of one level lie within it
PROMISED, DEMOTED, LIFTED, FRONT = "promised", "demoted", "lifted", "front"

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
    remembered = (PROMISED, DEMOTED, LIFTED, FRONT)
    promised, demoted, lifted, was_front = memory.recall(remembered, rows, serials)

    promised = np.where(promised > 0, promised, np.minimum(cap, jobs.total[rows]))
    promised, demoted, lifted = _outlived(output, cap, promised, demoted, lifted)
    waited_s = snapshot.now - jobs.since_s[rows]
    waited_s[split:] = -inf
    lifted = np.maximum(lifted, waited_s >= params["ageing_s"])
    starved_s = params["levels"] * params["ageing_s"]
    front = _to_front(
        was_front > 0, waited_s >= starved_s, jobs.arrival_s[rows], len(snapshot.workers)
    )

    remaining_s = pace.remaining_s(jobs, rows, promised - output)
    moved = demoted - lifted
    levels = _levels(remaining_s, moved, params)
    key = _key(levels, remaining_s, front, serials)
    line = _line(key, levels, remaining_s, moved, split, params)
    stays = front[split:] | (jobs.held[snapshot.running] == 0)
    line[split:][stays] = -inf
    lift_s = np.where(front, 0.0, np.maximum(0.0, starved_s - waited_s))
    memory = memory.with_columns(
        rows,
        serials,
        **{PROMISED: promised, DEMOTED: demoted, LIFTED: lifted, FRONT: front.astype(float)},
    )
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


def _to_front(front: Bools, starved: Bools, arrival_s: Floats, most: int) -> Bools:
    """The longest waiting of the starved fill what `most` leaves free."""
    free = most - int(np.count_nonzero(front))
    waiting = np.flatnonzero(starved & ~front)
    if free > 0 and len(waiting):
        front = front.copy()
        front[waiting[np.argsort(arrival_s[waiting], kind="stable")[:free]]] = True
    return front


def _levels(remaining_s: Floats, moved: Floats, params: Params) -> Floats:
    """The queue that a remaining time belongs to, moved; never out of the queues there are."""
    own = np.ceil(np.log2(np.maximum(remaining_s / params["base_s"], 1e-9)))
    last = params["levels"] - 1
    return np.clip(np.clip(own, 0, last) + moved, 0, last)


def _key(levels: Floats, remaining_s: Floats, front: Bools, serials: Ints) -> Floats:
    key = levels * LEVEL + np.minimum(remaining_s, LEVEL / 2)
    key[front] = -LEVEL + serials[front]
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
