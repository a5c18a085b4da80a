"""No tenant takes more than its weight while others wait."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, Snapshot


def over_share(snapshot: Snapshot, rows: Ints, split: int, key: Floats) -> Bools:
    """Of these rows (those before `split` wait), who waits of a tenant that has its share.

    While more than one tenant wants something, each is due its weight's share of the fleet's KV
    memory, where a request counts with prompt and expected output. What runs counts first, then
    those that wait in the order of their key; who lies beyond the share is over. A tenant alone,
    or one whose others don't wait, has no bound. O(jobs log jobs).
    """
    jobs = snapshot.jobs
    tenant = jobs.tenant[rows]
    over = np.zeros(len(rows), bool)
    if not split or (tenant == tenant[0]).all():
        return over
    names, which = np.unique(tenant, return_inverse=True)
    weights = np.zeros(len(names))
    weights[which] = jobs.weight[rows]
    due = weights / weights.sum() * sum(worker.room_tokens for worker in snapshot.workers)
    tokens = jobs.prompt[rows] + jobs.total[rows]
    used = np.bincount(which[split:], tokens[split:], len(names))
    at = np.lexsort((key[:split], which[:split]))
    takes, of = tokens[at], which[at]
    upto = np.cumsum(takes)
    starts = np.searchsorted(of, np.arange(len(names)))
    before = np.concatenate([[0.0], upto])[starts]
    beyond = used[of] + upto - before[of] > due[of]
    waiting = np.bincount(of, minlength=len(names)) > 0
    within = np.bincount(of, ~beyond, len(names)) > 0
    # Behind whom? Of others that wait, somebody must be within its share.
    others = np.count_nonzero(waiting & within) - (waiting & within).astype(int)
    over[at] = beyond & (others[of] > 0)
    return over
