"""What a job would find computed already, at each worker."""

import numpy as np

from services.forecast import Ints
from services.policies.snapshot import Jobs, Snapshot


def cached_tokens(snapshot: Snapshot, rows: Ints, jobs: Jobs) -> Ints:
    """Prompt tokens that each of these would find cached at each worker, (rows, workers): as many
    of a prompt's first blocks as are there without a gap. O(rows · CHAIN · log blocks) a worker."""
    found = np.zeros((len(rows), len(snapshot.workers)), np.int64)
    chains = snapshot.chains[rows]
    for column, worker in enumerate(snapshot.workers):
        if len(worker.prefixes):
            near = np.searchsorted(worker.prefixes, chains)
            there = worker.prefixes[np.minimum(near, len(worker.prefixes) - 1)] == chains
            blocks = np.cumprod(there & (chains != 0), axis=1).sum(axis=1)
            found[:, column] = np.minimum(blocks * worker.block_tokens, jobs.prompt)
    return found
