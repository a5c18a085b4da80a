"""Orders by waiting, none of which preempts.

arrival   first come, first served, with evicted requests in front (Past-Future Scheduler, Gong et
          al., ASPLOS 2025, §3.2)
fifo      first to enter the queue, first served: a request that returns from a slice goes behind
          those that arrived meanwhile (SCLS, Cheng et al., 2024, §5.4)
hrrn      highest response ratio next, (T_queue + T_serve) / T_serve (Magnus, Cheng et al., ICWS
          2024, §III-E): requests that need little time, and requests that have waited long
          compared with it, go first. Waiting is not bounded: under sustained overload, new short
          requests overtake the ratio of a long one.
"""

from math import inf

import numpy as np

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Pace, measure_pace
from services.policies.order.ranking import Ranking, forbid_preemption
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

PARAMS: dict[str, Param] = {}
MAX_AGE_S = 1e9  # longer than the age of any request


def arrival(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By arrival. O(jobs)."""
    jobs = snapshot.live
    key = jobs.arrival_s - snapshot.now
    key[jobs.preemptions > 0] -= MAX_AGE_S
    return _ranking(snapshot, key, *measure_pace(snapshot, memory))


def fifo(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By the time of last entering the queue. O(jobs)."""
    key = np.minimum(snapshot.live.since_s, snapshot.now) - snapshot.now
    return _ranking(snapshot, key, *measure_pace(snapshot, memory))


def hrrn(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By response ratio since arrival. Ratios change with time but have no effect before a slot is
    free, so that no extra round is requested. O(jobs)."""
    jobs = snapshot.live
    pace, memory = measure_pace(snapshot, memory)
    left = jobs.total - jobs.output
    serve_s = pace.on_clock_s(jobs, left, pace.step_s(snapshot))
    key = by_ratio(snapshot.now - jobs.arrival_s, serve_s)
    return _ranking(snapshot, key, pace, memory)


def by_ratio(wait_s: Floats, serve_s: Floats) -> Floats:
    """The negative response ratio, ascending by urgency. For a batch, `wait_s` is that of its
    longest waiting request and `serve_s` that of the whole batch."""
    return -(wait_s + serve_s) / serve_s


def _ranking(snapshot: Snapshot, key: Floats, pace: Pace, memory: PolicyMemory) -> Ranking:
    jobs, split = snapshot.live, len(snapshot.queued)
    remaining_s = pace.expected_s(jobs)
    lift_s = np.full(len(jobs), inf)
    queue_key = forbid_preemption(key, split)
    return Ranking(jobs.rows, split, key, queue_key, remaining_s, lift_s, inf, memory)
