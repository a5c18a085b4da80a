"""Orders by SLA: the earliest deadline first, or the least slack. Both preempt.

A request has no deadline but those it was given: its first token is due `ttft_s` after arrival;
each later one `tpot_s` after the one before, counted from the first, as a request is judged by its
mean; all of it by `deadline_s`. (A gap budget, `mtpot_s`, would need the time of the last token,
which the board does not have.)

Neither promises that nobody starves: whoever has no deadline waits for all who have one, by
arrival.
"""

from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Pace, keep_pace
from services.policies.order.ranking import CLASS, Ranking, fresh, next_of, steady
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, RequestColumns, Snapshot

# Who runs counts as due, or short of time, so much sooner; infinite: nobody makes way.
PARAMS = {"hysteresis_s": Param(0.5, 0.0, inf)}


def edf(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By the next deadline, passed ones included: of the first token, then of the next. O(jobs)."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    pace, memory = keep_pace(snapshot, memory)
    due_s = next_deadline_s(snapshot.jobs, rows) - snapshot.now
    return _ranking(snapshot, params, memory, pace, rows, due_s, np.isfinite(due_s), inf)


def slack(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By the least slack, the time to a deadline without the time still needed, while there is any;
    who can't meet its SLA any more goes behind, with those who have none, by arrival. O(jobs)."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    pace, memory = keep_pace(snapshot, memory)
    spare_s = slack_s(snapshot, rows, pace)
    first = np.isfinite(spare_s) & (spare_s > 0)
    waits = np.arange(len(rows)) < len(snapshot.queued)
    next_s = next_of(snapshot.now, spare_s[first & waits])  # then it is lost, and falls behind
    return _ranking(snapshot, params, memory, pace, rows, spare_s, first, next_s)


def next_deadline_s(jobs: RequestColumns, rows: Ints) -> Floats:
    """When each is next due, infinite where nothing is."""
    first_s, due_s = _first_s(jobs, rows)
    next_s = first_s + np.maximum(jobs.output[rows], 1) * jobs.tpot_s[rows]
    return np.minimum(np.where(np.isfinite(first_s), next_s, due_s), jobs.deadline_s[rows])


def slack_s(snapshot: Snapshot, rows: Ints, pace: Pace) -> Floats:
    """The least, over what each was promised, of the time left to keep it without the time that it
    takes on the clock; below 0 where it can't be kept any more, infinite where nothing was
    promised. The mean time per token is judged at the end, so what was made early may be spent."""
    jobs, now = snapshot.jobs, snapshot.now
    step_s = pace.step_s(snapshot)
    total = jobs.total[rows]
    first_s, due_s = _first_s(jobs, rows)
    ends_s = now + pace.on_clock_s(jobs, rows, total - jobs.output[rows], step_s)
    starts_s = now + pace.on_clock_s(jobs, rows, np.ones(len(rows)), step_s)
    paced_s = first_s + np.maximum(total - 1, 1) * jobs.tpot_s[rows] - ends_s
    paced_s[first_s > due_s] = -inf  # its first token was late
    spare_s = np.where(np.isfinite(first_s), paced_s, due_s - starts_s)
    return np.minimum(spare_s, jobs.deadline_s[rows] - ends_s)


def _first_s(jobs: RequestColumns, rows: Ints) -> tuple[Floats, Floats]:
    """When the first token came, infinite before, and when it was due. One that came before this
    scheduler knew of the request is taken to have come when it was due, or with the request where
    that was never."""
    first_s, due_s = jobs.first_s[rows], jobs.arrival_s[rows] + jobs.ttft_s[rows]
    unheard = np.isinf(first_s) & (jobs.output[rows] > 0)
    first_s[unheard] = np.where(np.isfinite(due_s), due_s, jobs.arrival_s[rows])[unheard]
    return first_s, due_s


def _ranking(
    snapshot: Snapshot,
    params: Params,
    memory: PolicyMemory,
    pace: Pace,
    rows: Ints,
    due_s: Floats,
    first: Bools,
    next_s: float,
) -> Ranking:
    """Those of `first` by `due_s`, then the others by arrival, among whom nobody makes way for
    another."""
    jobs, split = snapshot.jobs, len(snapshot.queued)
    age_s = np.minimum(snapshot.now - jobs.arrival_s[rows], CLASS)
    near_s = np.clip(due_s, -CLASS / 2, CLASS / 2)
    key = np.where(first, near_s, 2 * CLASS - age_s)
    passed = np.where(first, near_s - params["hysteresis_s"], CLASS)
    line = steady(key, passed[split:], fresh(snapshot) | np.isinf(params["hysteresis_s"]))
    remaining_s = pace.remaining_s(jobs, rows, jobs.total[rows] - jobs.output[rows])
    lift_s = np.full(len(rows), inf)
    return Ranking(rows, split, key, line, remaining_s, lift_s, next_s, memory)
