"""Limits each tenant to its weighted share while others wait."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, Snapshot


def is_over_share(snapshot: Snapshot, rows: Ints, split: int, key: Floats) -> Bools:
    """Marks the queued `rows` (those before `split`) of tenants that already have their share.

    While more than one tenant has requests, each tenant's share of the fleet's KV memory and of its
    running requests, at least one, is proportional to its weight. A request counts with its prompt
    and expected output. Running requests count first, then queued ones by key; those beyond either
    share are over it. A tenant alone, or with competitors that have nothing queued, has no limit.
    O(jobs log jobs).
    """
    jobs = snapshot.jobs
    tenant = jobs.tenant[rows]
    over = np.zeros(len(rows), bool)
    if not split or (tenant == tenant[0]).all():
        return over
    names, which = np.unique(tenant, return_inverse=True)
    weights = np.zeros(len(names))
    weights[which] = jobs.weight[rows]
    part = weights / weights.sum()
    share = part * sum(worker.room_tokens for worker in snapshot.workers)
    places = np.maximum(1.0, part * sum(worker.max_running for worker in snapshot.workers))
    tokens = jobs.prompt[rows] + jobs.total[rows]
    used = np.bincount(which[split:], tokens[split:], len(names))
    running = np.bincount(which[split:], minlength=len(names))
    at = np.lexsort((key[:split], which[:split]))
    takes, of = tokens[at], which[at]
    upto = np.cumsum(takes)
    starts = np.searchsorted(of, np.arange(len(names)))
    before = np.concatenate([[0.0], upto])[starts]
    nth = np.arange(1, split + 1) - starts[of]
    beyond = (used[of] + upto - before[of] > share[of]) | (running[of] + nth > places[of])
    waiting = np.bincount(of, minlength=len(names)) > 0
    within = np.bincount(of, ~beyond, len(names)) > 0
    # A request is only over its share if another tenant waits within its own.
    others = np.count_nonzero(waiting & within) - (waiting & within).astype(int)
    over[at] = beyond & (others[of] > 0)
    return over
