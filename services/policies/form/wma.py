"""Magnus' WMA-directed adaptive batching (Cheng et al., ICWS 2024, §III-C, Algorithm 1)."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.parameters import Params


def saved_access(length: Ints, max_output: Ints) -> Floats:
    """How much one member's own tokens lower the wasted memory access of a batch: G·L +
    G·(G − 1)/2."""
    made = max_output.astype(float)
    saved: Floats = made * length + made * (made - 1) / 2
    return saved


def wma(length: Floats | Ints, max_output: Floats | Ints, least_saved: Floats) -> Floats:
    """Wasted memory access: how often KV is read in vain for the worst-off member of each batch
    (Magnus, Eq. 2–4):

        max_p  G(p)·(L(B) − L(p)) + Σ_{g=G(p)}^{G(B)} (g + L(B))

    Expanded, the terms of p are −G(p)·L(p) − G(p)·(G(p) − 1)/2, so that the worst-off member has
    the least `saved_access`; the rest is (L(B) + G(B)/2)·(G(B) + 1). O(batches).
    """
    wasted: Floats = (length + max_output / 2) * (max_output + 1.0) - least_saved
    return wasted


def insert(sizes: Sizes, at: Ints, known: Batches, room: Room, params: Params) -> Ints:
    """Inserts each request, in order, into the batch with the least resulting WMA, if that is below
    `wma_max` and the batch still fits; otherwise it begins a new batch. The label is the batch's
    index among the `known` ones, and beyond them among the new ones. O(rows · batches), vectorised
    over the batches."""
    open_batches = _OpenBatches(len(known) + len(at), room)
    owns = saved_access(sizes.length, sizes.max_output)
    sized = known.size.tolist(), known.length.tolist(), known.max_output.tolist()
    for size, length, max_output, mine in zip(*sized, known.min_values(owns).tolist(), strict=True):
        open_batches.begin(size, length, max_output, mine)
    labels = np.zeros(len(at), np.int64)
    columns = sizes.length[at].tolist(), sizes.max_output[at].tolist(), owns[at].tolist()
    for nth, (length, max_output, mine) in enumerate(zip(*columns, strict=True)):
        into = open_batches.best(length, max_output, mine, params["wma_max"])
        if into is None:
            into = open_batches.begin(1, length, max_output, mine)
        else:
            open_batches.join(into, length, max_output, mine)
        labels[nth] = into
    return labels


class _OpenBatches:
    """Batches that still accept requests, in columns for at most `capacity` of them."""

    def __init__(self, capacity: int, room: Room):
        self._room = room
        self._count = 0
        self._size = [0] * capacity
        self._length, self._max_output, self._own = (np.zeros(capacity) for _ in range(3))
        self._full = np.zeros(capacity)  # infinite for a batch that accepts none

    def begin(self, size: int, length: int, max_output: int, mine: float) -> int:
        into = self._count
        self._count += 1
        self._own[into] = mine
        self._size[into] = size - 1
        self.join(into, length, max_output, mine)
        return into

    def join(self, into: int, length: int, max_output: int, mine: float) -> None:
        self._size[into] += 1
        self._length[into] = max(self._length[into], length)
        self._max_output[into] = max(self._max_output[into], max_output)
        self._own[into] = min(self._own[into], mine)
        if not self._fits(into, 0, 0):
            self._full[into] = np.inf

    def best(self, length: int, max_output: int, mine: float, most: float) -> int | None:
        """The batch with the least WMA including this request, if below `most`; the first of
        equals."""
        known = slice(self._count)
        longer = np.maximum(self._length[known], length)
        more = np.maximum(self._max_output[known], max_output)
        wasted = wma(longer, more, np.minimum(self._own[known], mine)) + self._full[known]
        while len(wasted):
            into = int(wasted.argmin())
            if not wasted[into] < most:
                return None
            if self._fits(into, length, max_output):
                return into
            wasted[into] = np.inf
        return None

    def _fits(self, into: int, length: int, max_output: int) -> bool:
        longest = max(int(self._length[into]), length)
        max_output = max(int(self._max_output[into]), max_output)
        return self._room.fits(self._size[into] + 1, longest, max_output)
