"""First come, first served; the evicted in front (ALGORITHMS 1, "when memory runs out")."""

from math import inf

import numpy as np

from services.policies.memory import PolicyMemory
from services.policies.order.pace import keep_pace
from services.policies.order.ranking import Ranking, sticky
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

PARAMS: dict[str, Param] = {}
AGES = 1e9  # longer than any request is old


def arrival(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By arrival; who runs stays. O(jobs)."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    jobs = snapshot.jobs
    split = len(snapshot.queued)
    key = jobs.arrival_s[rows] - snapshot.now
    key[jobs.preemptions[rows] > 0] -= AGES
    pace, memory = keep_pace(snapshot, memory)
    remaining_s = pace.remaining_s(jobs, rows, jobs.total[rows] - jobs.output[rows])
    lift_s = np.full(len(rows), inf)
    return Ranking(rows, split, key, sticky(key, split), remaining_s, lift_s, inf, memory)
