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
    index among the `known` ones, and beyond them among the new ones. O(rows · open batches),
    vectorised over the batches."""
    owns = saved_access(sizes.length, sizes.max_output)
    open_batches = _OpenBatches(known, known.min_values(owns), len(at), room)
    labels = np.zeros(len(at), np.int64)
    columns = sizes.length[at].tolist(), sizes.max_output[at].tolist(), owns[at].tolist()
    for nth, (length, max_output, mine) in enumerate(zip(*columns, strict=True)):
        into = open_batches.best(length, max_output, mine, params["wma_max"])
        labels[nth] = open_batches.join(into, length, max_output, mine)
    return labels


class _OpenBatches:
    """The batches that still accept requests, in columns, the first begun first: their labels,
    sizes, greatest lengths and outputs, and least `saved_access`."""

    def __init__(self, known: Batches, least_saved: Floats, more: int, room: Room):
        """The `known` batches, and room for `more`."""
        self._room = room
        self._next_label = len(known)
        accepts = room.fits_each(known.size + 1, known.length, known.max_output).nonzero()[0]
        self._count = len(accepts)
        columns = (accepts, known.size[accepts], known.length[accepts], known.max_output[accepts])
        self._columns = np.zeros((5, self._count + more))
        self._columns[:, : self._count] = *columns, least_saved[accepts]

    def join(self, into: int, length: int, max_output: int, mine: float) -> int:
        """Adds a request to the batch at this place, a new one behind the last; returns its
        label. A batch that accepts no more is removed."""
        batch = self._columns[:, into]
        if into == self._count:
            batch[:] = self._next_label, 0, 0, 0, mine
            self._count += 1
            self._next_label += 1
        label, size, longest, most, least = batch.tolist()
        batch[1:] = size + 1, max(longest, length), max(most, max_output), min(least, mine)
        if not self._fits(into, 0, 0):
            self._count -= 1
            self._columns[:, into : self._count] = self._columns[:, into + 1 : self._count + 1]
        return int(label)

    def best(self, length: int, max_output: int, mine: float, limit: float) -> int:
        """The place of the batch with the least WMA including this request, if below `limit`; the
        first of equals. A new batch's without one."""
        _, _, lengths, outputs, owns = self._columns[:, : self._count]
        longer, more = np.maximum(lengths, length), np.maximum(outputs, max_output)
        wasted = wma(longer, more, np.minimum(owns, mine))
        while len(wasted):
            into = int(wasted.argmin())
            if not wasted[into] < limit:
                break
            if self._fits(into, length, max_output):
                return into
            wasted[into] = np.inf
        return self._count

    def _fits(self, into: int, length: int, max_output: int) -> bool:
        """Whether one more request, of this length and output, fits into this batch."""
        _, size, longest, most, _ = self._columns[:, into].tolist()
        return self._room.fits(int(size) + 1, int(max(longest, length)), int(max(most, max_output)))
