"""Magnus' WMA-directed adaptive batching (papers/004 §III-C, Algorithm 1)."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.parameters import Params


def own(length: Ints, makes: Ints) -> Floats:
    """What of a batch's wasted memory access is a member's own, and is less the longer it is:
    G·L + G·(G − 1)/2."""
    made = makes.astype(float)
    saved: Floats = made * length + made * (made - 1) / 2
    return saved


def wma(length: Floats | Ints, makes: Floats | Ints, least_own: Floats) -> Floats:
    """Of batches, how often KV is read in vain for the worst off of their members (Eq. 2–4):

        max_p  G(p)·(L(B) − L(p)) + Σ_{g=G(p)}^{G(B)} (g + L(B))

    Summed up, what is of p in it is −G(p)·L(p) − G(p)·(G(p) − 1)/2, so that the worst off is who
    has the least `own`; the rest is L(B)·(G(B) + 1) + G(B)·(G(B) + 1)/2. O(batches).
    """
    wasted: Floats = length * (makes + 1.0) + makes * (makes + 1.0) / 2 - least_own
    return wasted


def insert(sizes: Sizes, at: Ints, known: Batches, room: Room, params: Params) -> Ints:
    """Each, in order, joins the batch whose WMA stays least, if that is below `wma_max` and the
    batch still fits; else it begins another. The answer is the place of its batch among the
    `known`, and beyond them among the new. O(rows · batches), vectorised over the batches."""
    count, open_ = len(known), len(known) + len(at)
    size, length, makes = (np.zeros(open_, np.int64) for _ in range(3))
    least = np.full(open_, np.inf)
    size[:count], length[:count], makes[:count] = known.size, known.length, known.makes
    owns = own(sizes.length, sizes.makes)
    least[:count] = known.least(owns)
    labels = np.zeros(len(at), np.int64)
    for nth, row in enumerate(at.tolist()):
        longer = np.maximum(length[:count], sizes.length[row])
        more = np.maximum(makes[:count], sizes.makes[row])
        wasted = wma(longer, more, np.minimum(least[:count], owns[row]))
        wasted[~room.holds(size[:count] + 1, longer, more)] = np.inf
        into = int(wasted.argmin()) if count else 0
        if not count or wasted[into] >= params["wma_max"]:
            into, count = count, count + 1
        labels[nth] = into
        size[into] += 1
        length[into] = max(length[into], sizes.length[row])
        makes[into] = max(makes[into], sizes.makes[row])
        least[into] = min(least[into], owns[row])
    return labels
