"""First to come to wait, first served: whoever comes back from a slice stands behind those who came
meanwhile (papers/003 §5.4: the unfinished are sent again)."""

from math import inf

import numpy as np

from services.policies.memory import PolicyMemory
from services.policies.order.pace import keep_pace
from services.policies.order.ranking import Ranking, sticky
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

PARAMS: dict[str, Param] = {}


def fifo(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By when each came to wait the last time; who runs stays. O(jobs)."""
    rows = np.concatenate([snapshot.queued, snapshot.running])
    jobs, split = snapshot.jobs, len(snapshot.queued)
    key = np.minimum(jobs.since_s[rows], snapshot.now) - snapshot.now
    pace, memory = keep_pace(snapshot, memory)
    remaining_s = pace.remaining_s(jobs, rows, jobs.total[rows] - jobs.output[rows])
    lift_s = np.full(len(rows), inf)
    return Ranking(rows, split, key, sticky(key, split), remaining_s, lift_s, inf, memory)
