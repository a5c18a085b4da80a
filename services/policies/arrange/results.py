"""Results common to both arrangements: a worker's decision, and why other requests wait."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitExplanations, WaitReason, WorkerDecision
from services.policies.preset import Preset
from services.policies.slice import SLICES
from services.policies.snapshot import Bools, Candidates, WorkerSnapshot
from services.policies.victim import VICTIMS


def worker_decision(
    candidates: Candidates,
    worker: WorkerSnapshot,
    preset: Preset,
    line: Ints,
    run: Bools,
    peak: float,
    lockstep: bool = False,
) -> WorkerDecision:
    """`line` may be in any order, `run` marks which of it run next; the decision lists them most
    urgent first. Victims of the highest priority value come first."""
    next_ones = np.sort(line[run])  # candidates are sorted by urgency
    jobs = candidates.jobs.select(next_ones)
    runs = candidates.is_running[next_ones]
    limits = SLICES[preset.slice].limits(candidates, worker, next_ones, preset.params)
    evict = VICTIMS[preset.victim](jobs, runs, candidates.key[next_ones])
    evict = evict[np.argsort(-jobs.priority[evict], kind="stable")]
    paused = line[candidates.is_running[line] & ~run]
    rows = candidates.rows
    victims = rows[next_ones[evict]]
    return WorkerDecision(
        worker.number, rows[next_ones], limits, rows[paused], victims, peak, lockstep
    )


def explain_all(candidates: Candidates, at: Ints, reason: WaitReason) -> WaitExplanations:
    """The same explanation, without numbers, for all of these positions."""
    nothing: Floats = np.zeros(len(at))
    return WaitExplanations(
        candidates.rows[at], np.full(len(at), reason, np.int64), nothing, nothing
    )
