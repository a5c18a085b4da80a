"""Orders by SLA: earliest deadline first, and least slack first. Both preempt.

Deadlines come only from the SLA. The first token is due `ttft_s` after arrival. Each later token is
due `tpot_s` after the one before, counted from the first, because a request is judged by its mean.
The end is due at `deadline_s`. A gap budget, `mtpot_s`, would need the time of the last token,
which the board does not have.

Neither order prevents starvation: requests without a deadline wait for all requests with one, in
order of arrival.
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Pace, measure_pace
from services.policies.order.ranking import CLASS, Ranking, earliest_s, limit_preemption
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, SelectedColumns, Snapshot

# A running request counts as due earlier, or shorter of time, by this much. Infinite: no request is
# preempted.
PARAMS = {"hysteresis_s": Param(0.5, 0.0, inf)}


def edf(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By the next deadline, including missed ones: of the first token, then of each next one.
    O(jobs)."""
    pace, memory = measure_pace(snapshot, memory)
    due_s = next_deadline_s(snapshot.live) - snapshot.now
    return _ranking(snapshot, params, memory, pace, due_s, np.isfinite(due_s), inf)


def slack(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By the least slack: the time to the deadline minus the time still needed. Requests that
    have missed their SLA follow, with those without an SLA, by arrival. O(jobs)."""
    pace, memory = measure_pace(snapshot, memory)
    spare_s = slack_s(snapshot, pace)
    first = np.isfinite(spare_s) & (spare_s > 0)
    waits = np.arange(len(spare_s)) < len(snapshot.queued)
    next_s = earliest_s(snapshot.now, spare_s[first & waits])  # at zero slack the SLA is missed
    return _ranking(snapshot, params, memory, pace, spare_s, first, next_s)


def any_budget(*columns: Floats) -> bool:
    """Whether any row of the board has one of these budgets. Most traffic without SLAs has none."""
    return min(float(column.min(initial=inf)) for column in columns) < inf


def next_deadline_s(jobs: SelectedColumns) -> Floats:
    """The next deadline of each request; infinite without one."""
    first_s, due_s = _first_s(jobs)
    next_s = first_s + np.maximum(jobs.output, 1) * jobs.tpot_s
    return np.minimum(np.where(np.isfinite(first_s), next_s, due_s), jobs.deadline_s)


def slack_s(snapshot: Snapshot, pace: Pace) -> Floats:
    """The least slack over a request's budgets: time left minus time needed on the clock.

    Negative if a budget cannot be met, infinite without budgets. The mean time per token is judged
    at the end, so earlier tokens may have used less of it.
    """
    jobs, now = snapshot.live, snapshot.now
    board = jobs.board
    if not any_budget(board.ttft_s, board.tpot_s, board.deadline_s):
        return np.full(len(jobs), inf)
    step_s = pace.step_s(snapshot)
    total = jobs.total
    first_s, due_s = _first_s(jobs)
    ends_s = now + pace.on_clock_s(jobs, total - jobs.output, step_s)
    starts_s = now + pace.on_clock_s(jobs, np.ones(len(jobs)), step_s)
    paced_s = first_s + np.maximum(total - 1, 1) * jobs.tpot_s - ends_s
    paced_s[first_s > due_s] = -inf  # the first token was late
    spare_s = np.where(np.isfinite(first_s), paced_s, due_s - starts_s)
    return np.minimum(spare_s, jobs.deadline_s - ends_s)


def gap_slack_s(snapshot: Snapshot, split: int) -> Floats:
    """Time until the gap since the last token exceeds its budget, for queued requests (those before
    `split`) with output; infinite for others. A paused request made its last token about when it
    entered the queue."""
    jobs = snapshot.live
    left_s = jobs.since_s + jobs.mtpot_s - snapshot.now
    begun = jobs.output > 0
    begun[split:] = False
    gap_s: Floats = np.where(begun, left_s, inf)
    return gap_s


def _first_s(jobs: SelectedColumns) -> tuple[Floats, Floats]:
    """Times of the first token, infinite before it, and its deadlines.

    A first token from before this scheduler knew the request counts as sent at its deadline, or at
    arrival without a deadline.
    """
    first_s, due_s = jobs.first_s, jobs.arrival_s + jobs.ttft_s
    unheard = np.isinf(first_s) & (jobs.output > 0)
    if unheard.any():
        sent_s = np.where(np.isfinite(due_s), due_s, jobs.arrival_s)
        first_s = np.where(unheard, sent_s, first_s)
    return first_s, due_s


def _ranking(
    snapshot: Snapshot,
    params: Params,
    memory: PolicyMemory,
    pace: Pace,
    due_s: Floats,
    first: Bools,
    next_s: float,
) -> Ranking:
    """Requests of `first` by `due_s`, then the others by arrival. The others do not preempt each
    other."""
    jobs, split = snapshot.live, len(snapshot.queued)
    age_s = np.minimum(snapshot.now - jobs.arrival_s, CLASS)
    near_s = np.clip(due_s, -CLASS / 2, CLASS / 2)
    key = np.where(first, near_s, 2 * CLASS - age_s)
    passed = np.where(first, near_s - params["hysteresis_s"], CLASS)
    stays = bool(np.isinf(params["hysteresis_s"]))
    queue_key = limit_preemption(snapshot, key, passed[split:], stays)
    remaining_s = pace.expected_s(jobs)
    lift_s = np.full(len(jobs), inf)
    return Ranking(jobs.rows, split, key, queue_key, remaining_s, lift_s, next_s, memory)
