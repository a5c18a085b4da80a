"""SCLS' serving-time-oriented batching (Cheng et al., 2024, §4.4, Algorithm 1)."""

import numpy as np

from services.forecast import Ints
from services.policies.estimate import linear
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.parameters import Params


def dp(sizes: Sizes, at: Ints, known: Batches, room: Room, params: Params) -> Ints:
    """The batches of least total serving time (SCLS, Eq. 10).

    Requests are sorted by length. T[i] = min over j ≤ i, as far as the batch fits, of T[j − 1] +
    T_serve(i − j + 1, L_i, S). Ties prefer the smaller last batch. `S` is the largest output of any
    request in its slice. Times are those of Eq. 1–4 whatever the preset's estimator, because every
    window needs one; they are affine in the size, so that a row of windows is one product. O(n ·
    N_max), vectorised over the windows.
    """
    count = len(at)
    order = np.lexsort((at, sizes.length[at]))
    length = sizes.length[at[order]].astype(float)
    steps = np.full(count, float(sizes.max_output[at].max(initial=1)))
    two_s = linear(room.cost, np.full(count, 2.0), length, steps)
    one_s = linear(room.cost, np.ones(count), length, steps)
    more_s, base_s = (two_s - one_s).tolist(), (2 * one_s - two_s).tolist()
    max_sizes = room.max_batch_size(sizes.length[at[order]], int(steps.max(initial=1))).tolist()
    counts = np.arange(1.0, max(max_sizes, default=1) + 1)
    total_s = np.zeros(count + 1)  # of the first i requests
    size = [0] * count
    for i in range(count):
        width = min(max_sizes[i], i + 1)
        ends_s = total_s[i + 1 - width : i + 1][::-1] + more_s[i] * counts[:width]
        best = int(ends_s.argmin())
        total_s[i + 1], size[i] = ends_s[best] + base_s[i], best + 1
    labels = np.zeros(count, np.int64)
    end, label = count, 0
    while end > 0:
        start = end - size[end - 1]
        labels[order[start:end]] = label
        end, label = start, label + 1
    return np.maximum(0, label - 1 - labels)  # the shorter first
