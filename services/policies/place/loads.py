"""How much a worker has to do, and how much more a job would give it."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Candidates, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Loads:
    """`there` is each worker's load; `adds` (rows, workers) what each row of the contest would add
    to it, and `scores` what is weighed beside the load when one is picked for it: the lower the
    better."""

    there: Floats
    adds: Floats
    scores: Floats


def by_tokens(contest: Candidates) -> Loads:
    """In tokens that jobs hold and are still to make, over the worker's speed with its memory full:
    a small worker beside a large one, or a slow one beside a fast one, gets its share, not half."""
    jobs = contest.jobs
    tokens = jobs.context + jobs.expected_remaining
    speeds = np.array([worker.full_speed for worker in contest.workers])
    there = np.array([np.sum(tokens[jobs.home == worker.number]) for worker in contest.workers])
    adds = tokens[:, None] / speeds
    return Loads(there / speeds, adds, np.zeros_like(adds))


def by_seconds(contest: Candidates, at: Ints) -> Loads:
    """In seconds of the worker's device, by its cost model; `at` says who is there."""
    adds = works_s(contest)
    return Loads(_sums(contest, at, adds), adds, np.zeros_like(adds))


def by_seconds_saved(contest: Candidates, at: Ints, weight: float) -> Loads:
    """The same, where what is cached needs no prefill; beside the load counts what a job adds, less
    the prefill that it saves times `weight`: at 1 it goes where it would be through the soonest,
    above that rather where its prefix is."""
    whole, adds = works_s(contest), works_s(contest, contest.cached)
    return Loads(_sums(contest, at, adds), adds, whole - weight * (whole - adds))


def works_s(contest: Candidates, cached: Ints | None = None) -> Floats:
    """What each job still takes of each worker, (rows, workers), with so much of it cached."""
    works = np.empty((len(contest.rows), len(contest.workers)))
    for i, worker in enumerate(contest.workers):
        there = cached[:, i] if cached is not None and cached.size else 0
        works[:, i] = work_s(contest, worker, there)
    return works


def _sums(contest: Candidates, at: Ints, adds: Floats) -> Floats:
    sums = [np.sum(adds[at == worker.number, i]) for i, worker in enumerate(contest.workers)]
    return np.array(sums)


def work_s(contest: Candidates, worker: WorkerSnapshot, cached: Ints | int = 0) -> Floats:
    """What each job still takes of this worker's device: its KV computed, as far as it is neither
    held nor `cached` here, and its tokens made, while as many run beside it as memory takes.

    A sequence's share of SCLS' T_serve (papers/003 Eq. 2) with n running: r tokens beyond a context
    of c take r·(base/n + seq) + context·Σ_{k ≤ r} (c + k), the sum being r·(c + r/2) but for a half
    a token.
    """
    jobs, cost = contest.jobs, worker.cost
    held = np.where(jobs.home == worker.number, jobs.held, 0)
    left = jobs.expected_remaining
    reads = left * (jobs.context + left / 2)
    missing = np.maximum(jobs.context - np.maximum(held, cached), 0)
    token_s = cost.base_s / worker.full_seqs + cost.decode_seq_s
    prefill_s = missing * cost.prefill_token_s
    work: Floats = prefill_s + left * token_s + cost.context_token_s * reads
    return work
