"""SCLS' serving-time-oriented batching (papers/003 §4.4, Algorithm 1)."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.estimate import linear
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.parameters import Params

CELLS = 2**18  # of the table of times, computed at once: 2 MB a column


def dp(sizes: Sizes, at: Ints, known: Batches, room: Room, params: Params) -> Ints:
    """The batches of least total serving time (Eq. 10): sorted by length, T[i] = min over j ≤ i, as
    far as it fits, of T[j − 1] + T_serve(i − j + 1, L_i, S); of equals the smaller last batch.

    The last of a window is its longest; `S` is what its members may make, the slice for all whose
    cap is not nearer. Times are by the closed sum of Eq. 1–4 whatever the preset's estimator: it is
    asked for every window. O(n · N_max), vectorised but for one minimum a row.
    """
    count = len(at)
    order = np.lexsort((at, sizes.length[at]))
    length, makes = sizes.length[at[order]], sizes.makes[at[order]]
    width = _widest(length, makes, room)
    total_s = np.zeros(count + width)  # of the first i at width + i − 1; infinite before the first
    total_s[: width - 1] = np.inf
    size = np.zeros(count, np.int64)
    step = max(1, CELLS // width)
    for begin in range(0, count, step):
        serve_s = _windows_s(length, makes, range(begin, min(count, begin + step)), width, room)
        for i, took_s in enumerate(serve_s, begin):
            # took_s[w] is of the window of w + 1; before it stand the first i − w.
            ends_s = total_s[i : i + width][::-1] + took_s
            best = int(ends_s.argmin())
            total_s[i + width], size[i] = ends_s[best], best + 1
    labels = np.zeros(count, np.int64)
    end, label = count, 0
    while end > 0:
        start = end - int(size[end - 1])
        labels[order[start:end]] = label
        end, label = start, label + 1
    return labels


def _widest(length: Ints, makes: Ints, room: Room) -> int:
    """How many the smallest could be together at most: N_max (Eq. 8)."""
    least = max(1, int((length + makes).min(initial=2**62)))
    return max(1, min(room.places, len(length), int(room.tokens // least)))


def _windows_s(length: Ints, makes: Ints, ends: range, width: int, room: Room) -> Floats:
    """(ends, width): what a batch takes that ends at this row and has so many; infinite where it
    would not fit."""
    rows = np.arange(ends.start, ends.stop)
    size = np.arange(1, width + 1)
    longest = length[rows, None]
    if len(makes) and (makes == makes[0]).all():
        steps = np.broadcast_to(makes[rows, None], (len(rows), width))
    else:
        back = rows[:, None] - np.arange(width)
        steps = np.maximum.accumulate(np.where(back >= 0, makes[np.maximum(back, 0)], 0), axis=1)
    serve_s = linear(room.cost, size.astype(float), longest.astype(float), steps.astype(float))
    fits = room.holds(size, longest, steps) & (size <= rows[:, None] + 1)
    return np.where(fits, serve_s, np.inf)
