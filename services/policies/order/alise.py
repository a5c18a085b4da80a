"""ALISE's priority queues: shortest remaining time first, with ageing and demotion.

ALISE (Zhao et al., 2024), §3.1, "Preemptive Scheduling". Level i holds requests with at most
base·2^i seconds remaining, and the last level all others. Within a level, the shorter request goes
first. A request that outlives its expected length L̂ has L̂ doubled and moves down one level. A
request that has waited `ageing_s` moves up one level, once: repeated ageing would bring every
request of an overloaded system to the top, and the order would become arrival order.

One level up does not prevent starvation. A request that has waited as long as ageing through every
level would take (`levels` · `ageing_s`) moves to the front, one per worker at a time
(starvation.py).
"""

from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.pace import measure_pace
from services.policies.order.ranking import CLASS, HYSTERESIS, Ranking, earliest_s, limit_preemption
from services.policies.order.starvation import find_starving, put_first
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

LEVEL = CLASS  # keys of one level stay within it
COLUMNS = ("expected_tokens", "forecast_row", "demoted", "lifted")

PARAMS = {
    "levels": Param(8, 1, 32),
    "base_s": Param(0.02, 1e-6, 1e6),
    "ageing_s": Param(10.0, 1e-3, 1e6),
    **HYSTERESIS,
}


def alise(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """The ALISE order. The memory holds each request's L̂ and its level moves.

    O(jobs), vectorised. A queued request passes a running one if its level is better and it needs
    less time by the share `hysteresis`, so that near-equal requests do not trade places. With
    infinite hysteresis none passes. A running request without KV has just been admitted and is not
    passed either.
    """
    jobs, split = snapshot.live, len(snapshot.queued)
    rows, serials, output, cap = jobs.rows, jobs.serial, jobs.output, jobs.cap
    pace, memory = measure_pace(snapshot, memory)
    expected_tokens, forecast_row, demoted, lifted = memory.recall(COLUMNS, rows, serials)

    forecast_changed = forecast_row != jobs.forecast + 1  # a better one replaces it
    expected_tokens = np.where(forecast_changed, np.minimum(cap, jobs.total), expected_tokens)
    expected_tokens, demoted, lifted = _outlived(output, cap, expected_tokens, demoted, lifted)
    waited_s = snapshot.now - jobs.since_s
    waited_s[split:] = -inf
    lifted = np.maximum(lifted, waited_s >= params["ageing_s"])
    starved = find_starving(snapshot, split, memory, params["levels"] * params["ageing_s"])

    remaining_s = pace.remaining_s(jobs, expected_tokens - output)
    moved = demoted - lifted
    levels = _levels(remaining_s, moved, params)
    key = levels * LEVEL + np.minimum(remaining_s, LEVEL / 2)
    key = put_first(key, starved.front, snapshot.now - jobs.arrival_s)
    passed = _passed(levels, remaining_s, moved, split, params)
    queue_key = limit_preemption(snapshot, key, passed, starved.front[split:])
    columns = (expected_tokens, jobs.forecast + 1.0, demoted, lifted)
    kept = {name: values.astype(float) for name, values in zip(COLUMNS, columns, strict=True)}
    memory = memory.with_columns(rows, serials, **kept, **starved.columns)
    lifts = (lifted[:split] == 0) & ~starved.front[:split]
    lift_due_s = (params["ageing_s"] - waited_s[:split])[lifts]
    next_s = min(starved.next_s, earliest_s(snapshot.now, lift_due_s))
    return Ranking(rows, split, key, queue_key, remaining_s, starved.lift_s, next_s, memory)


def _outlived(
    output: Ints, cap: Ints, expected_tokens: Floats, demoted: Floats, lifted: Floats
) -> tuple[Floats, Floats, Floats]:
    """Doubles L̂ for as long as it is outlived, and moves the request down one level each time."""
    while True:
        late = (expected_tokens <= output) & (expected_tokens < cap)
        if not late.any():
            return expected_tokens, demoted, lifted
        expected_tokens = np.where(late, np.minimum(2 * expected_tokens, cap), expected_tokens)
        demoted = demoted + late
        lifted = np.where(late, 0.0, lifted)


def _levels(remaining_s: Floats, moved: Floats, params: Params) -> Floats:
    """The level of each remaining time, shifted by `moved` and clipped to the existing levels."""
    own = np.ceil(np.log2(np.maximum(remaining_s / params["base_s"], 1e-9)))
    last = params["levels"] - 1
    return np.clip(np.clip(own, 0, last) + moved, 0, last)


def _passed(
    levels: Floats, remaining_s: Floats, moved: Floats, split: int, params: Params
) -> Floats:
    """The key below which a queued request passes each running one: the running request's key if it
    needed less time by the hysteresis, but never within its own level."""
    if np.isinf(params["hysteresis"]):
        return np.full(len(levels) - split, -inf)
    shorter_s = remaining_s[split:] / (1 + params["hysteresis"])
    passed = _levels(shorter_s, moved[split:], params) * LEVEL + shorter_s
    return np.minimum(passed, levels[split:] * LEVEL)
