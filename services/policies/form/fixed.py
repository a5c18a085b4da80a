"""Batches of a fixed size, in order (SLS in SCLS, §2.4; VS in Magnus, §II-E)."""

import numpy as np

from services.forecast import Ints
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.parameters import Params


def fixed(sizes: Sizes, at: Ints, known: Batches, room: Room, params: Params) -> Ints:
    """Batches of `batch_size`, first come, first served. The size must be one whose worst case fits
    (Magnus, Eq. 1); otherwise a batch ends early. O(rows)."""
    labels = np.zeros(len(at), np.int64)
    start = label = 0
    while start < len(at):
        window = at[start : start + max(1, room.slots)]
        length = np.maximum.accumulate(sizes.length[window])
        makes = np.maximum.accumulate(sizes.makes[window])
        fits = room.holds(np.arange(1, len(window) + 1), length, makes)
        count = max(1, len(window) if fits.all() else int(np.argmin(fits)))
        labels[start : start + count] = label
        start, label = start + count, label + 1
    return labels
