"""Results common to both arrangements: a worker's decision, and why other requests wait."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitExplanations, WaitReason, WorkerDecision
from services.policies.preset import Preset
from services.policies.slice import SLICES
from services.policies.snapshot import Bools, Candidates, WorkerSnapshot, distinct
from services.policies.victim import VICTIMS


def worker_decision(
    candidates: Candidates,
    worker: WorkerSnapshot,
    preset: Preset,
    line: Ints,
    run: Bools,
    peak: float,
    ranks: Ints,
    lockstep: bool = False,
) -> WorkerDecision:
    """`line` may be in any order, `run` marks which of it run next; the decision lists them most
    urgent first, and their victims by the `ranks` of `rank_victims`."""
    next_ones = line[run]
    next_ones.sort()  # candidates are sorted by urgency
    limits = SLICES[preset.slice].limits(candidates, worker, next_ones, preset.params)
    paused = line[candidates.is_running[line] & ~run]
    rows = candidates.rows
    victims = rows[next_ones[ranks[next_ones].argsort()]]
    return WorkerDecision(
        worker.number, rows[next_ones], limits, rows[paused], victims, peak, lockstep
    )


def rank_victims(candidates: Candidates, preset: Preset, at: Ints) -> Ints:
    """The place of each of these positions, which run next, in the order of eviction, parallel to
    the candidates. Victims of the highest priority value come first. Keys compare two requests
    alone, so one ranking serves all workers."""
    at = np.sort(at)
    jobs = candidates.jobs if len(at) == len(candidates.rows) else candidates.jobs.select(at)
    evict = VICTIMS[preset.victim](jobs, candidates.is_running[at], candidates.key[at])
    if len(distinct(jobs.priority)) > 1:
        evict = evict[np.argsort(-jobs.priority[evict], kind="stable")]
    ranks = np.zeros(len(candidates.rows), np.int64)
    ranks[at[evict]] = np.arange(len(at))
    return ranks


def explain_all(candidates: Candidates, at: Ints, reason: WaitReason) -> WaitExplanations:
    """The same explanation, without numbers, for all of these positions."""
    nothing: Floats = np.zeros(len(at))
    return WaitExplanations(
        candidates.rows[at], np.full(len(at), reason, np.int64), nothing, nothing
    )
