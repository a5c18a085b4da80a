"""The load of each worker, the load that each request would add, and its cached prefix there."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import (
    NOWHERE,
    Bools,
    Candidates,
    Columns,
    Snapshot,
)


@dataclass(frozen=True, slots=True)
class Loads:
    """`there` is each worker's load. `added` returns, for some rows, the load of each at each
    worker, and the value compared beside the load when a worker is picked, the lower the better;
    both have shape (rows, workers)."""

    there: Floats
    added: Callable[[Ints], tuple[Floats, Floats]]


def loads_in_tokens(candidates: Candidates) -> Loads:
    """In tokens held and still to make, over the worker's speed with full memory: a small or slow
    worker gets its share beside a large or fast one."""
    jobs = candidates.jobs
    tokens = jobs.context + jobs.expected_remaining
    speeds = np.array([worker.full_speed for worker in candidates.workers])
    there = np.array([np.sum(tokens[here]) for here in candidates.at_each_worker(jobs.home)])

    def added(rows: Ints) -> tuple[Floats, Floats]:
        adds = tokens[rows, None] / speeds
        return adds, np.broadcast_to(0.0, adds.shape)

    return Loads(there / speeds, added)


def loads_in_seconds(candidates: Candidates, at: Ints) -> Loads:
    """In seconds of the worker's device, by its cost model; `at` names the requests there."""

    def added(rows: Ints) -> tuple[Floats, Floats]:
        adds = work_by_worker_s(candidates, rows)
        return adds, np.broadcast_to(0.0, adds.shape)

    return Loads(_sums(candidates, at), added)


def loads_less_cached(candidates: Candidates, at: Ints, weight: float) -> Loads:
    """The same, without prefill of cached tokens. Beside the load counts what a request adds, minus
    the saved prefill times `weight`: at 1 it goes where it would finish first, above that
    increasingly to its prefix."""
    cached = candidates.cached if candidates.cached.any() else None

    def added(rows: Ints) -> tuple[Floats, Floats]:
        whole = work_by_worker_s(candidates, rows)
        if cached is None:
            return whole, whole
        adds = work_by_worker_s(candidates, rows, cached)
        return adds, whole - weight * (whole - adds)

    return Loads(_sums(candidates, at, cached), added)


def work_by_worker_s(candidates: Candidates, rows: Ints, cached: Ints | None = None) -> Floats:
    """`work_s` of these rows at each worker, (rows, workers). Without KV anywhere it is the same at
    all workers of equal costs."""
    costs = [worker.token_costs for worker in candidates.workers]
    if cached is not None or candidates.jobs.held[rows].any():
        return work_s(candidates, rows[:, None], np.arange(len(costs)), cached)
    kinds = {cost: nth for nth, cost in enumerate(dict.fromkeys(costs))}
    firsts = np.array([costs.index(cost) for cost in kinds])
    return work_s(candidates, rows[:, None], firsts)[:, [kinds[cost] for cost in costs]]


def work_s(candidates: Candidates, rows: Ints, at: Ints, cached: Ints | None = None) -> Floats:
    """Seconds that each of these rows still needs on the device of the worker of this index:
    prefill of KV that is neither held there nor `cached`, (all rows, workers), and its tokens,
    while as many run beside it as memory allows. `rows` and `at` broadcast. O(result).

    A sequence's share of SCLS' T_serve (Eq. 2) with n running: r tokens beyond a context of c take
    r·(base/n + seq) + context·Σ_{k ≤ r} (c + k), where the sum is r·(c + r/2) up to half a token.
    """
    jobs = candidates.jobs
    context, left = jobs.context[rows], jobs.expected_remaining[rows]
    there = np.where(candidates.indices_of(jobs.home[rows]) == at, jobs.held[rows], 0)
    if cached is not None:
        there = np.maximum(there, cached[rows, at])
    costs = np.array([worker.token_costs for worker in candidates.workers])
    prefill_s, token_s, context_s, tokens_per_step = costs.T[:, at]
    reads = left * (context + left / 2)  # context tokens
    decode_s = (left * token_s + context_s * reads) / tokens_per_step
    work: Floats = np.maximum(context - there, 0) * prefill_s + decode_s
    return work


def _sums(candidates: Candidates, at: Ints, cached: Ints | None = None) -> Floats:
    """Seconds of the requests at each worker, by its number in `at`."""
    index = candidates.indices_of(at)
    rows = (index != NOWHERE).nonzero()[0]
    works = np.zeros(len(at))
    works[rows] = work_s(candidates, rows, index[rows], cached)
    return np.array([np.sum(works[here]) for here in candidates.at_each_worker(at)])


def cached_tokens(snapshot: Snapshot, rows: Ints, jobs: Columns) -> Ints:
    """Cached prompt tokens, (rows, deciding workers): as many of a prompt's first blocks as are
    cached without a gap. Empty if no prompt has a known block.

    Each distinct hash is looked up once, in order, which is several times as fast: O(rows ·
    CHAIN · (log (rows · CHAIN) + workers) + hashes · log blocks · workers).
    """
    known = len(snapshot.chains) and snapshot.chains[rows, 0].any()
    if not known:  # a prompt without a first block has no others
        return np.zeros((0, 0), np.int64)
    found = np.zeros((len(rows), len(snapshot.deciding)), np.int64)
    chains = snapshot.chains[rows]
    names, which = np.unique(chains, return_inverse=True)
    for column, worker in enumerate(snapshot.deciding):
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
