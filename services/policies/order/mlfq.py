"""Skip-join multi-level feedback queues: who has run for long makes way, whatever it was foretold.

FastServe's order, a baseline of papers/002 (§5.1, appendix A). Queue i serves a job for at most
base·growth^i seconds, then moves it to the end of the next; the better queue goes first, within
one whoever came to it first, and only a better queue's job takes the place of one that runs, who
so goes on when it is moved down beside others (the baseline's code puts it before those, too). As a
prompt is prefilled in one piece, a job joins the first queue that could serve that within its
quantum, and skips those before (skip-join).

Off unless asked for, as in that baseline: who has waited for `ageing_s` at a stretch comes to the
end of the first queue. Those who came there before it have a quantum of it each, whoever comes
later stands behind: with k before it, its turn comes after at most k·base seconds of service.
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.iterations import progress, served_s
from services.policies.order.pace import keep_pace
from services.policies.order.ranking import CLASS, TICK_S, Ranking, fresh, next_of, steady
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

COLUMNS = ("queue", "used_s", "entered_s")

PARAMS = {
    "base_quantum_s": Param(0.03, 1e-6, 1e6),
    "growth": Param(2.0, 1.01, 1e3),
    "queues": Param(16, 1, 64),
    "ageing_s": Param(inf, 1e-3, inf),
}


def mlfq(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By queue, then by when it was joined. O(jobs · queues) at most, O(jobs) as a rule."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    jobs, split, now = snapshot.jobs, len(snapshot.queued), snapshot.now
    serials = jobs.serial[rows]
    pace, memory = keep_pace(snapshot, memory)
    step_s = pace.step_s(snapshot)
    done, memory = progress(snapshot, memory, rows, split)
    queue, used_s, entered_s = memory.recall(COLUMNS, rows, serials)

    first_s = step_s + (jobs.prompt[rows] + jobs.output[rows]) * pace.prefill_token_s
    queue = np.where(done.seen, queue, _joins(first_s, params))
    entered_s = np.where(done.seen, entered_s, jobs.arrival_s[rows])
    used_s = used_s + served_s(done, pace, step_s)
    queue, used_s, entered_s = _demoted(queue, used_s, entered_s, now, params)
    waited_s = now - jobs.since_s[rows]
    waited_s[split:] = -inf
    lifted = (waited_s >= params["ageing_s"] - TICK_S) & (queue > 0)
    queue, used_s = np.where(lifted, 0.0, queue), np.where(lifted, 0.0, used_s)
    entered_s = np.where(lifted, now, entered_s)

    key = queue * CLASS + CLASS / 2 - np.minimum(now - entered_s, CLASS / 4)
    line = steady(key, queue[split:] * CLASS, fresh(snapshot))
    lift_s = np.full(len(rows), inf)  # to the end of a queue is not to the front
    columns = dict(zip(COLUMNS, (queue, used_s, entered_s), strict=True))
    memory = memory.with_columns(rows, serials, **columns, **done.columns)
    remaining_s = pace.remaining_s(jobs, rows, jobs.total[rows] - jobs.output[rows])
    next_s = next_of(now, (params["ageing_s"] - waited_s)[:split][queue[:split] > 0])
    return Ranking(rows, split, key, line, remaining_s, lift_s, next_s, memory)


def _joins(first_s: Floats, params: Params) -> Floats:
    """The first queue whose quantum takes the first iteration; the last where none does."""
    own = np.ceil(np.log(first_s / params["base_quantum_s"]) / np.log(params["growth"]) - 1e-9)
    joins: Floats = np.clip(own, 0, params["queues"] - 1)
    return joins


def _demoted(
    queue: Floats, used_s: Floats, entered_s: Floats, now: float, params: Params
) -> tuple[Floats, Floats, Floats]:
    """One queue down for each quantum that was outlived; what was used beyond counts there."""
    while True:
        quantum_s = params["base_quantum_s"] * params["growth"] ** queue
        out = (used_s > quantum_s) & (queue < params["queues"] - 1)
        if not out.any():
            return queue, used_s, entered_s
        used_s = np.where(out, used_s - quantum_s, used_s)
        queue = queue + out
        entered_s = np.where(out, now, entered_s)
