"""Serving times of whole batches by a worker's cost model, for forming and ordering batches.

Each function answers for many batches at once: columns in, a column out. A batch is static: all of
it is padded to its longest prompt and stays until its last token (SCLS, §4.2; Magnus, §III).
"""

from collections.abc import Callable

import numpy as np

from services.costs import CostModel, Neighbours
from services.forecast import Floats

Estimate = Callable[[CostModel, Floats, Floats, Floats], Floats]
"""(cost, seqs, length, steps) → seconds to prefill each batch of `seqs` prompts, padded to `length`
tokens, and to make `steps` new tokens of each. The columns broadcast; none may be negative."""

REACH = 0.5  # in doublings, over all three features: batches within this distance are alike
TIED = 1e-9  # tolerance of a squared distance for ties with the k-th neighbour
CHUNK = 1_024  # batches of which distances are computed at once: 2 MB with 256 neighbours


def linear(cost: CostModel, seqs: Floats, length: Floats, steps: Floats) -> Floats:
    """SCLS' T_serve (Eq. 1–4), in closed form. O(batches)."""
    return cost.serve_s(seqs, length, steps)


def knn(cost: CostModel, seqs: Floats, length: Floats, steps: Floats) -> Floats:
    """Magnus' KNN regression (§III-D): the mean time of the k most similar served batches by size,
    length and generated tokens.

    Similarity is distance in doublings, so that no unit dominates (the paper does not specify it).
    A missing neighbour within REACH is replaced by the linear model: without served batches the
    result is `linear`. O(batches · neighbours).
    """
    columns = np.broadcast_arrays(*(np.asarray(c, float) for c in (seqs, length, steps)))
    linear_s = linear(cost, *columns)
    if not cost.neighbours:
        return linear_s
    queries = np.stack([c.ravel() for c in columns])
    flat = linear_s.ravel()
    parts = [
        _knn_mean(cost.neighbours, queries[:, at : at + CHUNK], flat[at : at + CHUNK])
        for at in range(0, flat.size, CHUNK)
    ]
    return np.concatenate(parts).reshape(linear_s.shape) if parts else linear_s


def _knn_mean(neighbours: Neighbours, queries: Floats, linear_s: Floats) -> Floats:
    """The mean over each one's k neighbours, or more if several tie with the k-th."""
    served, seconds = np.log2(1 + neighbours.columns[:3]), neighbours.columns[3]
    features = np.log2(1 + queries)
    # |a − b|² = |a|² + |b|² − 2·a·b, the last by one product of matrices.
    distance = (
        (features**2).sum(axis=0)[:, None] + (served**2).sum(axis=0) - 2 * features.T @ served
    )
    near = distance <= REACH**2
    crowded = np.flatnonzero(near.sum(axis=1) > neighbours.k)
    kth = min(neighbours.k, len(seconds)) - 1
    last = np.partition(distance[crowded], kth, axis=1)[:, kth, None]
    near[crowded] &= distance[crowded] <= last + TIED
    count = near.sum(axis=1)
    elsewhere = np.maximum(neighbours.k - count, 0)
    answer: Floats = (near @ seconds + elsewhere * linear_s) / (count + elsewhere)
    return answer


ESTIMATES: dict[str, Estimate] = {"linear": linear, "knn": knn}
