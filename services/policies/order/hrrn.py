"""Highest response ratio next: (T_queue + T_serve) / T_serve, Magnus' order (papers/004 §III-E).

Whoever needs little goes first, and whoever has waited for long compared with what it needs. It
promises no bound: in a system that stays overloaded, newcomers that need little catch up with the
ratio of one who needs much.
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.pace import keep_pace
from services.policies.order.ranking import Ranking, sticky
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

PARAMS: dict[str, Param] = {}


def hrrn(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By response ratio, since arrival; who runs stays. Ratios change with time, but nothing comes
    of it before a place is free: no round is asked for. O(jobs)."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    jobs, split = snapshot.jobs, len(snapshot.queued)
    pace, memory = keep_pace(snapshot, memory)
    left = jobs.total[rows] - jobs.output[rows]
    serve_s = pace.on_clock_s(jobs, rows, left, pace.step_s(snapshot))
    key = by_ratio(snapshot.now - jobs.arrival_s[rows], serve_s)
    lift_s = np.full(len(rows), inf)
    remaining_s = pace.remaining_s(jobs, rows, left)
    return Ranking(rows, split, key, sticky(key, split), remaining_s, lift_s, inf, memory)


def by_ratio(wait_s: Floats, serve_s: Floats) -> Floats:
    """Of jobs, or of batches, whose `wait_s` is that of its longest waiting and `serve_s` that of
    the whole: the response ratio, negative, so that it ascends by urgency."""
    return -(wait_s + serve_s) / serve_s
