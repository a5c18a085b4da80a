"""foretoken's order: requests with an SLA at risk first, then the shortest first.

Four classes, each by size (`by`: Gittins' index, the mean, or the mean and its tail):

  at risk     queued with a gap or an end that can be met but is due in less than `return_s`; and
              requests that would miss their first token behind all shorter ones but can still meet
              it, as many as take no more than `pressed_share` of the slack of the delayed ones
  on time     the SLA can be met, or there is none
  missed      the SLA is already missed: behind those above, never dropped
  over share  requests of a tenant above its share while others wait (fairness.py)

A running request can be preempted by one that is smaller by the share `hysteresis` if its SLA
allows a pause of more than `lend_s`. It moves to the class at risk, and returns, before its gap or
end is late. No other request with an SLA that can be met is preempted, because a pause would break
it. A request that has waited `ageing_s` moves to the front, one per worker at a time
(starvation.py). That bounds every wait, including those of long requests and of requests with a
missed SLA.
"""

from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.deadlines import gap_slack_s, slack_s
from services.policies.order.fairness import is_over_share
from services.policies.order.pace import Pace, measure_pace
from services.policies.order.ranking import (
    CLASS,
    HYSTERESIS,
    Ranking,
    earliest_s,
    is_just_admitted,
    limit_preemption,
)
from services.policies.order.shortest import SIZES, TAIL_PARAMS
from services.policies.order.starvation import find_starving, put_first
from services.policies.parameters import Param, Params, named
from services.policies.snapshot import Bools, Snapshot

AT_RISK, ON_TIME, MISSED, OVER_SHARE = 0.0, 1.0, 2.0, 3.0

PARAMS = {
    **TAIL_PARAMS,
    **HYSTERESIS,
    "by": named(*SIZES),
    # A running request can be preempted if its SLA allows a longer pause. Infinite: none with a
    # reachable SLA is.
    "lend_s": Param(0.5, 0.0, inf),
    # A paused request returns when this much of its slack is left. Below `lend_s`, otherwise it is
    # paused again at once.
    "return_s": Param(0.25, 0.0, 1e6),
    # The share of the slack of requests that stay on time; requests that would be late may take it
    # at once.
    "pressed_share": Param(0.25, 0.0, 1.0),
    # A request that would be late is at risk when this much time is left; before, others may end.
    "pressed_s": Param(1.0, 0.0, 1e6),
}


def promise(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """The promise order. O(jobs log jobs), vectorised, and O(64) for each request whose size
    changed."""
    rows = snapshot.live
    split, jobs = len(snapshot.queued), snapshot.jobs
    pace, memory = measure_pace(snapshot, memory)
    remaining_s = pace.expected_s(jobs, rows)
    spare_s = np.minimum(slack_s(snapshot, rows, pace), gap_slack_s(snapshot, rows, split))
    starved = find_starving(snapshot, rows, split, memory, params["ageing_s"])
    patience_s = np.minimum(spare_s[split:], jobs.mtpot_s[rows[split:]])
    cannot_pause = (
        (spare_s[split:] > 0) & (patience_s <= params["lend_s"]) & np.isfinite(patience_s)
    )
    stays = starved.front[split:] | is_just_admitted(snapshot) | cannot_pause
    stays |= np.isinf(params["hysteresis"])
    size_s, kept = _sizes(snapshot, params, memory, pace, rows, stays, remaining_s)
    in_time = spare_s[:split] > 0
    classes = np.where(spare_s > 0, ON_TIME, MISSED)
    turns_s = spare_s[:split][in_time]  # the SLA is missed at that time, without any other event
    next_s = earliest_s(snapshot.now, turns_s)
    lent = (jobs.output[rows[:split]] > 0) & in_time
    back_s = spare_s[:split] - params["return_s"]
    classes[:split][lent & (back_s <= 0)] = AT_RISK
    next_s = min(next_s, earliest_s(snapshot.now, back_s[lent]))
    if params["pressed_share"]:
        takes_s = remaining_s[:split] / max(1, len(snapshot.workers))
        ahead_s = _ahead_s(size_s[:split], takes_s, in_time)
        classes[:split][_find_at_risk(ahead_s, takes_s, spare_s[:split], params)] = AT_RISK
        next_s = min(next_s, earliest_s(snapshot.now, turns_s - params["pressed_s"]))
    near_s = np.minimum(size_s, CLASS / 2)
    classes[is_over_share(snapshot, rows, split, classes * CLASS + near_s)] = OVER_SHARE

    age_s = snapshot.now - jobs.arrival_s[rows]
    key = put_first(classes * CLASS + near_s, starved.front, age_s)
    passed = classes * CLASS + near_s / (1.0 + params["hysteresis"])
    queue_key = limit_preemption(snapshot, key, passed[split:], stays)
    memory = memory.with_columns(rows, jobs.serial[rows], **starved.columns, **kept)
    next_s = min(next_s, starved.next_s)
    return Ranking(rows, split, key, queue_key, remaining_s, starved.lift_s, next_s, memory)


def _sizes(
    snapshot: Snapshot,
    params: Params,
    memory: PolicyMemory,
    pace: Pace,
    rows: Ints,
    stays: Bools,
    remaining_s: Floats,
) -> tuple[Floats, dict[str, Floats]]:
    """The size of each request, and the columns to remember. A running request that `stays` changes
    its size with each token and is compared with none, so its mean suffices."""
    compared = np.concatenate([np.ones(len(rows) - len(stays), bool), ~stays])
    size = SIZES[list(SIZES)[int(params["by"])]]
    sized_s, known = size(snapshot, params, memory, pace, rows[compared])
    size_s, kept = remaining_s.copy(), {name: np.zeros(len(rows)) for name in known}
    size_s[compared] = sized_s
    for name, column in known.items():
        kept[name][compared] = column
    return size_s, kept


def _ahead_s(size_s: Floats, takes_s: Floats, among: Bools) -> Floats:
    """For requests of `among`, the fleet time of all smaller ones of them; 0 for the others."""
    at = np.flatnonzero(among)
    at = at[np.argsort(size_s[at], kind="stable")]
    ahead_s = np.zeros(len(size_s))
    ahead_s[at] = np.cumsum(takes_s[at]) - takes_s[at]
    return ahead_s


def _find_at_risk(ahead_s: Floats, takes_s: Floats, spare_s: Floats, params: Params) -> Ints:
    """Queued requests that would be late behind smaller ones and have at most `pressed_s` left: the
    quickest of them, as many as take no more than the allowed share of the least slack among
    requests that stay on time."""
    stays_on_time = spare_s > ahead_s
    at = np.flatnonzero((spare_s > 0) & ~stays_on_time & (spare_s <= params["pressed_s"]))
    at = at[np.argsort(takes_s[at], kind="stable")]
    spared_s = float(np.min((spare_s - ahead_s)[stays_on_time], initial=inf))
    return at[np.cumsum(takes_s[at]) <= params["pressed_share"] * spared_s]
