"""Learning to rank's order: shortest first by a score given once, with starvation prevention.

Learning to Rank (Fu et al., NeurIPS 2024), Alg. 1: waiting, running and swapped requests are ranked
together in each iteration; what fits is taken from the top, and the rest is preempted. A score
depends on the prompt alone: here the mean of the forecast before any output. A better forecast of
the same prompt, which arrives later because no request waits for one, replaces the score. The
output so far does not change it: ranking again gained nothing (appendix, Tab. 9).

Starvation prevention follows the authors' public code. A request that does not run in an iteration
increments its count, and a run resets it. At `threshold` the request is promoted above all ranks,
its count restarts, and it gets a `quantum` of iterations. Each iteration it runs costs one; at 0 it
is demoted to its rank.

Among promoted requests the code ranks by score again. If more requests starve than run, those of
the lowest rank starve forever: each other is demoted after its quantum and promoted again before
them. `promoted = "oldest"`, our own, serves those first that were promoted first: with k ahead of
it, a promoted request runs after at most k quanta, divided by the number of slots. A quantum is at
least the time between two rounds.

With `guess_tokens`, the order is the paper's baseline Perception Only (§5.1): the served model says
in its first tokens how long its answer will be. A request with less output than that has no score
yet and goes before all requests that have one, in order of arrival; among promoted requests too.
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.iterations import progress
from services.policies.order.pace import measure_pace
from services.policies.order.ranking import CLASS, HYSTERESIS, Ranking, earliest_s, limit_preemption
from services.policies.order.starvation import put_first
from services.policies.parameters import Param, Params, named
from services.policies.snapshot import Bools, Snapshot

COLUMNS = ("score", "forecast_row", "idle", "quantum", "promoted_s")
OLDEST = 0.0
ROUNDING = 1e-6  # in iterations

# `threshold` and `quantum` are in iterations: the values of the authors' fairness runs
# ("starv200-period10"). `guess_tokens` 0: a request has its score from the start.
PARAMS = {
    "threshold": Param(200, 1, 1e9),
    "quantum": Param(10, 1, 1e9),
    "promoted": named("oldest", "rank"),
    "guess_tokens": Param(0, 0, 1e6),
    **HYSTERESIS,
}


def rank(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """Promoted requests, then those with less output than `guess_tokens`, by arrival, then all
    others by score. A queued request passes a running one of a later class, and one of its own if
    its score is less by the share `hysteresis`, or its arrival is earlier. O(jobs)."""
    jobs, split, now = snapshot.live, len(snapshot.queued), snapshot.now
    rows, serials = jobs.rows, jobs.serial
    pace, memory = measure_pace(snapshot, memory)
    step_s = pace.step_s(snapshot)
    done, memory = progress(snapshot, memory, split)
    score, forecast_row, idle, quantum, promoted_s = memory.recall(COLUMNS, rows, serials)

    forecast, cap = jobs.forecast, jobs.cap
    forecast_changed = forecast_row != forecast + 1
    score[forecast_changed] = snapshot.forecasts.mean(
        forecast[forecast_changed],
        np.zeros(int(forecast_changed.sum()), np.int64),
        cap[forecast_changed],
    )
    idle = np.where(done.ran, 0.0, idle) + done.waited_s / step_s
    quantum = np.maximum(quantum - done.iterations, 0.0)
    starved = idle >= params["threshold"] - ROUNDING
    promoted_s = np.where(starved & (quantum == 0), now, promoted_s)
    quantum = np.where(starved, params["quantum"], quantum)
    idle = np.where(starved, 0.0, idle)

    promoted = quantum > 0
    guessing = jobs.output < params["guess_tokens"]
    ranked = put_first(score, guessing, now - jobs.arrival_s)
    key, passed = _keys(ranked, promoted, now - promoted_s, params)
    queue_key = limit_preemption(
        snapshot, key, passed[split:], bool(np.isinf(params["hysteresis"]))
    )
    due_s = (params["threshold"] - idle) * step_s
    next_s = earliest_s(now, due_s[:split])
    crowded = bool(promoted[:split].any())  # waiting does not lift a request over promoted ones
    lift_s = np.full(len(rows), inf) if crowded else due_s
    columns = (score, forecast + 1.0, idle, quantum, promoted_s)
    kept = {name: np.asarray(column, float) for name, column in zip(COLUMNS, columns, strict=True)}
    memory = memory.with_columns(rows, serials, **kept, **done.columns)
    remaining_s = pace.expected_s(jobs)
    return Ranking(rows, split, key, queue_key, remaining_s, lift_s, next_s, memory)


def _keys(score: Floats, promoted: Bools, age_s: Floats, params: Params) -> tuple[Floats, Floats]:
    """Keys, and the key below which a queued request passes each one while it runs."""
    passed = score / (1.0 + params["hysteresis"])
    if params["promoted"] == OLDEST:
        first = -CLASS - np.minimum(age_s, CLASS)
        return np.where(promoted, first, score), np.where(promoted, first, passed)
    above = np.where(promoted, CLASS * 2, 0.0)
    return score - above, passed - above
