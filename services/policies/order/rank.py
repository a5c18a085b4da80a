"""Learning to rank's order: short first by a score given once, with starvation prevention.

papers/002: waiting, running and swapped together are ordered by rank each iteration, what fits is
taken from the top, and the rest preempted. A score is of the prompt alone, on arrival: here the
mean of the forecast before anything is made. (A better forecast of the same prompt, which comes
later because nobody waits for one, is that score; what the answer has come to by then changes
nothing, for ranking again gained nothing: appendix, Tab. 9.)

Starvation prevention is what the authors' public code does (its text is missing from our copy): a
request not run in an iteration adds 1 to its count, which a run sets back; at `threshold` it is
promoted above all ranks, the count begins anew, and it gets a `quantum` of iterations; each that it
runs costs one; at 0 it is demoted to its rank.

Among the promoted the code goes by rank again. Where more starve than run, those of the lowest rank
then starve for good: each of the others is demoted after its quantum, and promoted again before
them. `promoted = "oldest"`, our own, takes those first who were promoted first: with k ahead of it,
a promoted request runs after at most k quanta, of as many as run at once at a time. (As a round
may come later than a quantum ends, a quantum is no shorter than the time between two rounds.)
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.iterations import progress
from services.policies.order.pace import keep_pace
from services.policies.order.ranking import (
    CLASS,
    HYSTERESIS,
    Ranking,
    fresh,
    next_of,
    steady,
)
from services.policies.parameters import Param, Params, named
from services.policies.snapshot import Bools, Snapshot

COLUMNS = ("score", "foreseen", "idle", "quantum", "promoted_s")
OLDEST = 0.0
ROUNDING = 1e-6  # of an iteration

# In iterations: the numbers of the authors' fairness runs ("starv200-period10").
PARAMS = {
    "threshold": Param(200, 1, 1e9),
    "quantum": Param(10, 1, 1e9),
    "promoted": named("oldest", "rank"),
    **HYSTERESIS,
}


def rank(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """The promoted, then all others by score. A running job is passed by one whose score is less
    by a share of `hysteresis`, or who is promoted where it is not. O(jobs)."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    jobs, split, now = snapshot.jobs, len(snapshot.queued), snapshot.now
    serials = jobs.serial[rows]
    pace, memory = keep_pace(snapshot, memory)
    step_s = pace.step_s(snapshot)
    done, memory = progress(snapshot, memory, rows, split)
    score, foreseen, idle, quantum, promoted_s = memory.recall(COLUMNS, rows, serials)

    forecast, cap = jobs.forecast[rows], jobs.cap[rows]
    told_anew = foreseen != forecast + 1
    score[told_anew] = snapshot.forecasts.mean(
        forecast[told_anew], np.zeros(int(told_anew.sum()), np.int64), cap[told_anew]
    )
    idle = np.where(done.ran, 0.0, idle) + done.waited_s / step_s
    quantum = np.maximum(quantum - done.iterations, 0.0)
    starved = idle >= params["threshold"] - ROUNDING
    promoted_s = np.where(starved & (quantum == 0), now, promoted_s)
    quantum = np.where(starved, params["quantum"], quantum)
    idle = np.where(starved, 0.0, idle)

    promoted = quantum > 0
    key, passed = _keys(score, promoted, now - promoted_s, params)
    line = steady(key, passed[split:], fresh(snapshot) | np.isinf(params["hysteresis"]))
    due_s = (params["threshold"] - idle) * step_s
    next_s = next_of(now, due_s[:split])
    crowded = bool(promoted[:split].any())  # time alone brings nobody before those
    lift_s = np.full(len(rows), inf) if crowded else due_s
    columns = (score, forecast + 1.0, idle, quantum, promoted_s)
    memory = memory.with_columns(
        rows, serials, **dict(zip(COLUMNS, columns, strict=True)), **done.columns
    )
    remaining_s = pace.remaining_s(jobs, rows, jobs.total[rows] - jobs.output[rows])
    return Ranking(rows, split, key, line, remaining_s, lift_s, next_s, memory)


def _keys(score: Floats, promoted: Bools, age_s: Floats, params: Params) -> tuple[Floats, Floats]:
    """Keys, and where each would be passed while it runs."""
    passed = score / (1.0 + params["hysteresis"])
    if params["promoted"] == OLDEST:
        first = -CLASS - np.minimum(age_s, CLASS)
        return np.where(promoted, first, score), np.where(promoted, first, passed)
    above = np.where(promoted, CLASS * 2, 0.0)
    return score - above, passed - above
