"""Skip-join multi-level feedback queues: a long-running request is demoted, whatever its forecast.

FastServe's order, a baseline in ALISE's and in the learning-to-rank paper (Fu et al., NeurIPS 2024,
§5.1 and appendix A). Queue i serves a request for at most base·growth^i seconds and then moves it
to the end of the next. Better queues go first; within a queue, the order is that of joining. Only a
request of a better queue preempts a running one, so that a request moved down continues beside its
new peers. (The baseline's code lets those go first.) A prompt is prefilled in one piece, so that a
request joins the first queue with a quantum that covers its prefill (skip-join).

Ageing is off by default, as in that baseline: a request that has waited `ageing_s` without a break
joins the end of the first queue. Each request before it there has one quantum, so that with k
before it, its turn comes after at most k·base seconds of service.
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.iterations import progress, served_s
from services.policies.order.pace import measure_pace
from services.policies.order.ranking import CLASS, TICK_S, Ranking, earliest_s, limit_preemption
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
    """By queue, then by the time of joining it. O(jobs · queues) at most, O(jobs) usually."""
    jobs, split, now = snapshot.live, len(snapshot.queued), snapshot.now
    rows, serials = jobs.rows, jobs.serial
    pace, memory = measure_pace(snapshot, memory)
    step_s = pace.step_s(snapshot)
    done, memory = progress(snapshot, memory, split)
    queue, used_s, entered_s = memory.recall(COLUMNS, rows, serials)

    first_s = step_s + jobs.context * pace.prefill_token_s
    new = (~done.seen).nonzero()[0]
    queue[new] = _joins(first_s[new].astype(float), params)
    entered_s = np.where(done.seen, entered_s, jobs.arrival_s)
    used_s = used_s + served_s(done, pace, step_s)
    _demote(queue, used_s, entered_s, now, params)
    waited_s = now - jobs.since_s
    waited_s[split:] = -inf
    lifted = ((waited_s >= params["ageing_s"] - TICK_S) & (queue > 0)).nonzero()[0]
    queue[lifted], used_s[lifted], entered_s[lifted] = 0.0, 0.0, now

    key = queue * CLASS + CLASS / 2 - np.minimum(now - entered_s, CLASS / 4)
    queue_key = limit_preemption(snapshot, key, queue[split:] * CLASS)
    lift_s = np.full(len(rows), inf)  # the end of a queue is not the front
    columns = dict(zip(COLUMNS, (queue, used_s, entered_s), strict=True))
    memory = memory.with_columns(rows, serials, **columns, **done.columns)
    remaining_s = pace.expected_s(jobs)
    next_s = earliest_s(now, (params["ageing_s"] - waited_s)[:split][queue[:split] > 0])
    return Ranking(rows, split, key, queue_key, remaining_s, lift_s, next_s, memory)


def _joins(first_s: Floats, params: Params) -> Floats:
    """The first queue with a quantum that covers the first iteration; the last if none does."""
    own = np.ceil(np.log(first_s / params["base_quantum_s"]) / np.log(params["growth"]) - 1e-9)
    joins: Floats = np.clip(own, 0, params["queues"] - 1)
    return joins


def _demote(queue: Floats, used_s: Floats, entered_s: Floats, now: float, params: Params) -> None:
    """Moves down one queue per exhausted quantum, in these columns; excess service counts in the
    next queue."""
    quanta_s = params["base_quantum_s"] * params["growth"] ** np.arange(params["queues"])
    at = np.arange(len(queue))
    while len(at):
        here_s = quanta_s[queue[at].astype(np.int64)]
        out = (used_s[at] > here_s) & (queue[at] < params["queues"] - 1)
        at = at[out]
        used_s[at] -= here_s[out]
        queue[at] += 1
        entered_s[at] = now
