"""The load of each worker, the load that each request would add, and its cached prefix there."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import (
    NOWHERE,
    Bools,
    Candidates,
    Columns,
    Snapshot,
    WorkerSnapshot,
)


@dataclass(frozen=True, slots=True)
class Loads:
    """`there` is each worker's load; `adds` (rows, workers) the load of each request there;
    `scores` the value compared beside the load when a worker is picked: the lower the better."""

    there: Floats
    adds: Floats
    scores: Floats


def loads_in_tokens(candidates: Candidates) -> Loads:
    """In tokens held and still to make, over the worker's speed with full memory: a small or slow
    worker gets its share beside a large or fast one."""
    jobs = candidates.jobs
    tokens = jobs.context + jobs.expected_remaining
    speeds = np.array([worker.full_speed for worker in candidates.workers])
    there = np.array([np.sum(tokens[here]) for here in candidates.at_each_worker(jobs.home)])
    adds = tokens[:, None] / speeds
    return Loads(there / speeds, adds, np.broadcast_to(0.0, adds.shape))


def loads_in_seconds(candidates: Candidates, at: Ints) -> Loads:
    """In seconds of the worker's device, by its cost model; `at` names the requests there."""
    adds = work_by_worker_s(candidates)
    return Loads(_sums(candidates, at, adds), adds, np.broadcast_to(0.0, adds.shape))


def loads_less_cached(candidates: Candidates, at: Ints, weight: float) -> Loads:
    """The same, without prefill of cached tokens. Beside the load counts what a request adds, minus
    the saved prefill times `weight`: at 1 it goes where it would finish first, above that
    increasingly to its prefix."""
    whole, cached = work_by_worker_s(candidates), candidates.cached
    if not cached.any():
        return Loads(_sums(candidates, at, whole), whole, whole)
    adds = work_by_worker_s(candidates, cached)
    return Loads(_sums(candidates, at, adds), adds, whole - weight * (whole - adds))


def work_by_worker_s(candidates: Candidates, cached: Ints | None = None) -> Floats:
    """Seconds that each request still needs at each worker, (rows, workers), with that much of it
    cached. O(rows · kinds of workers), and O(rows · workers) to write them."""
    jobs, workers = candidates.jobs, candidates.workers
    # Transposed, because columns are written.
    works = np.empty((len(workers), len(candidates.rows))).T
    reads, home = _reads(jobs), candidates.indices_of(jobs.home)
    costs = [_TokenCosts.at(worker) for worker in workers]
    alike: dict[_TokenCosts, Floats] = {}  # for requests with nothing at the worker
    for i, cost in enumerate(costs):
        if cost not in alike:
            alike[cost] = _work_s(cost, 0, *reads)
        works[:, i] = alike[cost]
    # Requests with KV at home or a cached prefix need less there.
    rows = (home != NOWHERE).nonzero()[0]
    at, there = home[rows], jobs.held[rows]
    if cached is not None and cached.size:
        tokens = cached.copy()
        tokens[rows, at] = np.maximum(tokens[rows, at], there)
        rows, at = tokens.nonzero()
        there = tokens[rows, at]
    if len(rows):
        each = _TokenCosts(*np.array(costs).T[:, at])
        works[rows, at] = _work_s(each, there, *(column[rows] for column in reads))
    return works


def _sums(candidates: Candidates, at: Ints, adds: Floats) -> Floats:
    here = candidates.at_each_worker(at)
    return np.array([np.sum(adds[rows, i]) for i, rows in enumerate(here)])


def _reads(jobs: Columns) -> tuple[Ints, Floats, Floats]:
    """Contexts, tokens still expected, and the context tokens that these will read."""
    context, left = jobs.context, jobs.expected_remaining
    return context, left, left * (context + left / 2)


class _TokenCosts(NamedTuple):
    """Of a worker, as numbers, or of the workers of several requests, as columns."""

    prefill_s: float | Floats
    token_s: float | Floats  # of a sequence beside as many others as memory allows
    context_s: float | Floats
    tokens_per_step: float | Floats

    @staticmethod
    def at(worker: WorkerSnapshot) -> "_TokenCosts":
        cost = worker.cost
        token_s = cost.base_s / worker.full_seqs + cost.decode_seq_s
        return _TokenCosts(
            cost.prefill_token_s, token_s, cost.context_token_s, cost.tokens_per_step
        )


def _work_s(
    cost: _TokenCosts, there: Ints | int, context: Ints, left: Floats, reads: Floats
) -> Floats:
    """Seconds that each request still needs on this worker's device: prefill of KV that is neither
    held nor cached `there`, and its tokens, while as many run beside it as memory allows.

    A sequence's share of SCLS' T_serve (Eq. 2) with n running: r tokens beyond a context of c take
    r·(base/n + seq) + context·Σ_{k ≤ r} (c + k), where the sum is r·(c + r/2) up to half a token.
    """
    missing = np.maximum(context - there, 0)
    decode_s = (left * cost.token_s + cost.context_s * reads) / cost.tokens_per_step
    work: Floats = missing * cost.prefill_s + decode_s
    return work


def cached_tokens(snapshot: Snapshot, rows: Ints, jobs: Columns) -> Ints:
    """Cached prompt tokens, (rows, workers): as many of a prompt's first blocks as are cached
    without a gap.

    Each distinct hash is looked up once, in order, which is several times as fast: O(rows ·
    CHAIN · (log (rows · CHAIN) + workers) + hashes · log blocks · workers).
    """
    found = np.zeros((len(rows), len(snapshot.workers)), np.int64)
    if not len(snapshot.chains):
        return found
    if not snapshot.chains[rows, 0].any():  # a prompt without a first block has no others
        return found
    chains = snapshot.chains[rows]
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
