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

from services.forecast import Floats, Ints
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Pace, measure_pace
from services.policies.order.ranking import Ranking, forbid_preemption
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

PARAMS: dict[str, Param] = {}
MAX_AGE_S = 1e9  # longer than the age of any request


def arrival(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By arrival. O(jobs)."""
    rows, jobs = snapshot.live, snapshot.jobs
    key = jobs.arrival_s[rows] - snapshot.now
    key[jobs.preemptions[rows] > 0] -= MAX_AGE_S
    return _ranking(snapshot, rows, key, *measure_pace(snapshot, memory))


def fifo(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By the time of last entering the queue. O(jobs)."""
    rows = snapshot.live
    key = np.minimum(snapshot.jobs.since_s[rows], snapshot.now) - snapshot.now
    return _ranking(snapshot, rows, key, *measure_pace(snapshot, memory))


def hrrn(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By response ratio since arrival. Ratios change with time but have no effect before a slot is
    free, so that no extra round is requested. O(jobs)."""
    rows, jobs = snapshot.live, snapshot.jobs
    pace, memory = measure_pace(snapshot, memory)
    left = jobs.total[rows] - jobs.output[rows]
    serve_s = pace.on_clock_s(jobs, rows, left, pace.step_s(snapshot))
    key = by_ratio(snapshot.now - jobs.arrival_s[rows], serve_s)
    return _ranking(snapshot, rows, key, pace, memory)


def by_ratio(wait_s: Floats, serve_s: Floats) -> Floats:
    """The negative response ratio, ascending by urgency. For a batch, `wait_s` is that of its
    longest waiting request and `serve_s` that of the whole batch."""
    return -(wait_s + serve_s) / serve_s


def _ranking(
    snapshot: Snapshot, rows: Ints, key: Floats, pace: Pace, memory: PolicyMemory
) -> Ranking:
    jobs, split = snapshot.jobs, len(snapshot.queued)
    remaining_s = pace.expected_s(jobs, rows)
    lift_s = np.full(len(rows), inf)
    queue_key = forbid_preemption(key, split)
    return Ranking(rows, split, key, queue_key, remaining_s, lift_s, inf, memory)
