"""How much a worker has to do, and how much more a job would give it."""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import Contest, Worker


@dataclass(frozen=True, slots=True)
class Loads:
    """`there` is each worker's load; `adds` (rows, workers) what each row of the contest would add
    to it, and `scores` what is weighed beside the load when one is picked for it: the lower the
    better."""

    there: Floats
    adds: Floats
    scores: Floats


def by_tokens(contest: Contest) -> Loads:
    """In tokens that jobs hold and are still to make, over the worker's speed with its memory full:
    a small worker beside a large one, or a slow one beside a fast one, gets its share, not half."""
    jobs = contest.jobs
    tokens = jobs.context + jobs.left
    speeds = np.array([worker.full_speed for worker in contest.workers])
    there = np.array([np.sum(tokens[jobs.home == worker.number]) for worker in contest.workers])
    adds = tokens[:, None] / speeds
    return Loads(there / speeds, adds, np.zeros_like(adds))


def by_seconds(contest: Contest, at: Ints) -> Loads:
    """In seconds of the worker's device, by its cost model; `at` says who is there."""
    adds = np.empty((len(contest.rows), len(contest.workers)))
    for i, worker in enumerate(contest.workers):
        adds[:, i] = work_s(contest, worker)
    there = [np.sum(adds[at == worker.number, i]) for i, worker in enumerate(contest.workers)]
    return Loads(np.array(there), adds, np.zeros_like(adds))


def with_credit(contest: Contest, loads: Loads, weight: float) -> Loads:
    """Beside the load that a job adds counts the prefill that it saves where its beginning is
    cached, times `weight`: at 1 it goes where it would be through the soonest, above that rather
    where its prefix is."""
    saved = saved_s(contest)
    return Loads(loads.there, loads.adds - saved, loads.adds - weight * saved)


def work_s(contest: Contest, worker: Worker) -> Floats:
    """What each job still takes of this worker's device: its KV computed, as far as it is not here,
    and its tokens made, while as many run beside it as memory takes.

    A sequence's share of SCLS' T_serve (papers/003 Eq. 2) with n running: r tokens beyond a context
    of c take r·(base/n + seq) + context·Σ_{k ≤ r} (c + k), the sum being r·(c + r/2) but for a half
    a token.
    """
    jobs, cost = contest.jobs, worker.cost
    held = np.where(jobs.home == worker.number, jobs.held, 0)
    left = jobs.left
    reads = left * (jobs.context + left / 2)
    prefill_s = np.maximum(jobs.context - held, 0) * cost.prefill_token_s
    token_s = cost.base_s / worker.full_seqs + cost.decode_seq_s
    work: Floats = prefill_s + left * token_s + cost.context_token_s * reads
    return work


def saved_s(contest: Contest) -> Floats:
    """Seconds of prefill that each would save at each worker, (rows, workers)."""
    prefill_token_s = np.array([worker.cost.prefill_token_s for worker in contest.workers])
    if contest.cached.size == 0:
        return np.zeros((len(contest.rows), len(contest.workers)))
    saved: Floats = contest.cached * prefill_token_s
    return saved
