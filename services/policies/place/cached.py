"""Prompt tokens of each request that each worker has in its prefix cache."""

import numpy as np

from services.forecast import Ints
from services.policies.snapshot import Bools, RequestColumns, Snapshot


def cached_tokens(snapshot: Snapshot, rows: Ints, jobs: RequestColumns) -> Ints:
    """Cached prompt tokens, (rows, workers): as many of a prompt's first blocks as are cached
    without a gap.

    Each distinct hash is looked up once, in order, which is several times as fast: O(rows ·
    CHAIN · (log (rows · CHAIN) + workers) + hashes · log blocks · workers).
    """
    found = np.zeros((len(rows), len(snapshot.workers)), np.int64)
    if not len(snapshot.chains):
        return found
    chains = snapshot.chains[rows]
    if not chains.any():
        return found
    names, which = np.unique(chains, return_inverse=True)
    for column, worker in enumerate(snapshot.workers):
        if len(worker.prefixes):
            near = np.searchsorted(worker.prefixes, names)
            there = worker.prefixes[np.minimum(near, len(worker.prefixes) - 1)] == names
            there &= names != 0
            blocks = _leading(there[which].reshape(chains.shape))
            found[:, column] = np.minimum(blocks * worker.block_tokens, jobs.prompt)
    return found


def _leading(there: Bools) -> Ints:
    """The number of leading true values of each row."""
    leading: Ints = np.where(there.all(axis=1), there.shape[1], np.argmin(there, axis=1))
    return leading
