"""foretoken's own order: what was promised first, and of that the shortest first.

Four classes, each by size (`by`: Gittins' index, the mean, or the mean and its tail):

  pressed   wait with a gap, or an end, that can be kept but is due in less than `return_s`;
            and those who would miss their first token behind all the shorter ones, yet can still
            have it: so many as take no more than `pressed_share` of the time that those who are
            pushed back can spare
  kept      their SLA can be met, or nothing was promised
  lost      their SLA can't be met any more: behind all whose can, never dropped
  over      a tenant's that has its weight's share already, while another's wait (fair.py)

Who runs lends its place to one that is smaller by a share of `hysteresis`, if its SLA lets it pause
for more than `lend_s`: it comes back, pressed, before a gap or its end is late. Nobody else whose
SLA can be met makes way: to be paused is what would break it. Whoever has waited for `ageing_s`
comes to the front, one a worker at a time (starving.py): that bounds every wait, of the lost and of
long ones too.
"""

from math import inf

import numpy as np

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.deadlines import slack_s
from services.policies.order.fairness import over_share
from services.policies.order.pace import Pace, keep_pace
from services.policies.order.ranking import CLASS, HYSTERESIS, Ranking, fresh, next_of, steady
from services.policies.order.shortest import SIZES, TAIL_PARAMS
from services.policies.order.starvation import at_front, starving
from services.policies.parameters import Param, Params, named
from services.policies.snapshot import Bools, Snapshot

PRESSED, KEPT, LOST, OVER = 0.0, 1.0, 2.0, 3.0

PARAMS = {
    **TAIL_PARAMS,
    **HYSTERESIS,
    "by": named(*SIZES),
    # Who runs makes way if its SLA lets it pause for longer; infinite: nobody who can keep it does.
    "lend_s": Param(0.5, 0.0, inf),
    # Who was paused comes back when so long is left; less than `lend_s`, or it goes at once again.
    "return_s": Param(0.25, 0.0, 1e6),
    # Of what those who are on time can spare, so much at once goes to who would be late.
    "pressed_share": Param(0.25, 0.0, 1.0),
    # Who would be late is pressed when it has so little time left: till then, others may end.
    "pressed_s": Param(1.0, 0.0, 1e6),
}


def promise(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """O(jobs log jobs), vectorised, and O(64) for each whose size changed."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    split, jobs = len(snapshot.queued), snapshot.jobs
    pace, memory = keep_pace(snapshot, memory)
    remaining_s = pace.remaining_s(jobs, rows, jobs.total[rows] - jobs.output[rows])
    spare_s = np.minimum(slack_s(snapshot, rows, pace), _gap_s(snapshot, rows, split))
    starved = starving(snapshot, rows, split, memory, params["ageing_s"])
    patience_s = np.minimum(spare_s[split:], jobs.mtpot_s[rows[split:]])
    promised = (spare_s[split:] > 0) & (patience_s <= params["lend_s"]) & np.isfinite(patience_s)
    stays = starved.front[split:] | fresh(snapshot) | promised | np.isinf(params["hysteresis"])
    size_s, kept = _sizes(snapshot, params, memory, pace, rows, stays, remaining_s)
    in_time = spare_s[:split] > 0
    classes = np.where(spare_s > 0, KEPT, LOST)
    turns_s = spare_s[:split][in_time]  # then they are lost, which time alone brings about
    next_s = next_of(snapshot.now, turns_s)
    lent = (jobs.output[rows[:split]] > 0) & in_time
    back_s = spare_s[:split] - params["return_s"]
    classes[:split][lent & (back_s <= 0)] = PRESSED
    next_s = min(next_s, next_of(snapshot.now, back_s[lent]))
    if params["pressed_share"]:
        takes_s = remaining_s[:split] / max(1, len(snapshot.workers))
        ahead_s = _ahead_s(size_s[:split], takes_s, in_time)
        classes[:split][_pressed(ahead_s, takes_s, spare_s[:split], params)] = PRESSED
        next_s = min(next_s, next_of(snapshot.now, turns_s - params["pressed_s"]))
    near_s = np.minimum(size_s, CLASS / 2)
    classes[over_share(snapshot, rows, split, classes * CLASS + near_s)] = OVER

    age_s = snapshot.now - jobs.arrival_s[rows]
    key = at_front(classes * CLASS + near_s, starved.front, age_s)
    passed = classes * CLASS + near_s / (1.0 + params["hysteresis"])
    line = steady(key, passed[split:], stays)
    memory = memory.with_columns(rows, jobs.serial[rows], **starved.columns, **kept)
    next_s = min(next_s, starved.next_s)
    return Ranking(rows, split, key, line, remaining_s, starved.lift_s, next_s, memory)


def _sizes(
    snapshot: Snapshot,
    params: Params,
    memory: PolicyMemory,
    pace: Pace,
    rows: Ints,
    stays: Bools,
    remaining_s: Floats,
) -> tuple[Floats, dict[str, Floats]]:
    """How large each is, and what is to be remembered of it. Who runs and `stays` makes tokens, so
    its size is never the same twice, and nobody is compared with it: its mean will do."""
    asked = np.concatenate([np.ones(len(rows) - len(stays), bool), ~stays])
    size = SIZES[list(SIZES)[int(params["by"])]]
    sized_s, known = size(snapshot, params, memory, pace, rows[asked])
    size_s, kept = remaining_s.copy(), {name: np.zeros(len(rows)) for name in known}
    size_s[asked] = sized_s
    for name, column in known.items():
        kept[name][asked] = column
    return size_s, kept


def _gap_s(snapshot: Snapshot, rows: Ints, split: int) -> Floats:
    """Time left until the gap since the last token breaks its budget, of those who wait with some
    made; a paused one made its last about when it came to wait."""
    jobs = snapshot.jobs
    left_s = jobs.since_s[rows] + jobs.mtpot_s[rows] - snapshot.now
    begun = jobs.output[rows] > 0
    begun[split:] = False
    gap_s: Floats = np.where(begun, left_s, inf)
    return gap_s


def _ahead_s(size_s: Floats, takes_s: Floats, among: Bools) -> Floats:
    """Of these, the time that all the smaller ones of them take the fleet; 0 of the others."""
    at = np.flatnonzero(among)
    at = at[np.argsort(size_s[at], kind="stable")]
    ahead_s = np.zeros(len(size_s))
    ahead_s[at] = np.cumsum(takes_s[at]) - takes_s[at]
    return ahead_s


def _pressed(ahead_s: Floats, takes_s: Floats, spare_s: Floats, params: Params) -> Ints:
    """Of those who wait, who would be late behind the smaller ones, and has `pressed_s` left: the
    quickest of them, as many as take no more than the share of what the least patient of those on
    time can spare."""
    on_time = spare_s > ahead_s
    at = np.flatnonzero((spare_s > 0) & ~on_time & (spare_s <= params["pressed_s"]))
    at = at[np.argsort(takes_s[at], kind="stable")]
    spared_s = float(np.min((spare_s - ahead_s)[on_time], initial=inf))
    return at[np.cumsum(takes_s[at]) <= params["pressed_share"] * spared_s]
