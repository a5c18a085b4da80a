"""How long whole batches take, by a worker's cost model: what forms and orders batches asks.

Each answers for many batches at once: columns in, a column out. A batch is static, so all of it
is padded to its longest prompt and stays until its last token (papers/003 §4.2, papers/004 §III).
"""

from collections.abc import Callable

import numpy as np

from services.core import CostModel, Neighbours
from services.forecast import Floats

Estimate = Callable[[CostModel, Floats, Floats, Floats], Floats]
"""(cost, seqs, length, steps) → seconds to prefill each batch of `seqs` prompts, padded to `length`
tokens, and to make `steps` new tokens of each. The columns broadcast; none may be negative."""

REACH = 0.5  # of a doubling, all three together: within it a batch is like another
CHUNK = 1_024  # batches whose distances are held at once: 2 MB with 256 neighbours


def linear(cost: CostModel, seqs: Floats, length: Floats, steps: Floats) -> Floats:
    """SCLS' T_serve (papers/003 Eq. 1-4), in closed form. O(batches)."""
    return cost.serve_s(seqs, length, steps)


def knn(cost: CostModel, seqs: Floats, length: Floats, steps: Floats) -> Floats:
    """Magnus' KNN regression (papers/004 §III-D): the mean time of the k served batches most like
    it by size, length and generated tokens.

    Likeness is distance in doublings, so that no unit outweighs another (the paper does not say).
    A place among the k that no batch within REACH takes is the linear model's: with nothing
    served yet all are, and the answer is `linear`'s. O(batches · neighbours).
    """
    columns = np.broadcast_arrays(*(np.asarray(c, float) for c in (seqs, length, steps)))
    told = linear(cost, *columns)
    if not cost.neighbours:
        return told
    asked = np.stack([c.ravel() for c in columns])
    flat = told.ravel()
    parts = [
        _asked(cost.neighbours, asked[:, at : at + CHUNK], flat[at : at + CHUNK])
        for at in range(0, flat.size, CHUNK)
    ]
    return np.concatenate(parts).reshape(told.shape) if parts else told


def _asked(neighbours: Neighbours, asked: Floats, told: Floats) -> Floats:
    """The mean over each one's k places."""
    served = neighbours.columns
    distance = np.zeros((asked.shape[1], served.shape[1]))
    for mine, theirs in zip(np.log2(1 + asked), np.log2(1 + served[:3]), strict=True):
        distance += (mine[:, None] - theirs) ** 2
    k = min(neighbours.k, served.shape[1])
    nearest = np.argpartition(distance, k - 1, axis=1)[:, :k]
    near = np.take_along_axis(distance, nearest, axis=1) <= REACH**2
    elsewhere = neighbours.k - near.sum(axis=1)
    seconds: Floats = np.where(near, served[3][nearest], 0.0).sum(axis=1) + elsewhere * told
    return seconds / neighbours.k


ESTIMATES: dict[str, Estimate] = {"linear": linear, "knn": knn}
