"""What both arrangements say: a worker's share, and why the others wait."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitExplanations, WaitReason, WorkerDecision
from services.policies.preset import Preset
from services.policies.slice import SLICES
from services.policies.snapshot import Bools, Candidates, WorkerSnapshot
from services.policies.victim import VICTIMS


def worker_decision(
    contest: Candidates,
    worker: WorkerSnapshot,
    preset: Preset,
    line: Ints,
    run: Bools,
    peak: float,
    lockstep: bool = False,
) -> WorkerDecision:
    """`line` may stand in any order, `run` says who of it runs next; who runs is told the most
    urgent first. Victims are those of the highest priority number first."""
    next_ones = np.sort(line[run])  # contests are sorted by urgency
    jobs = contest.jobs.select(next_ones)
    runs = contest.is_running[next_ones]
    limits = SLICES[preset.slice].limits(contest, worker, next_ones, preset.params)
    evict = VICTIMS[preset.victim](jobs, runs, contest.key[next_ones])
    evict = evict[np.argsort(-jobs.priority[evict], kind="stable")]
    paused = line[contest.is_running[line] & ~run]
    rows = contest.rows
    victims = rows[next_ones[evict]]
    return WorkerDecision(
        worker.number, rows[next_ones], limits, rows[paused], victims, peak, lockstep
    )


def explain_all(contest: Candidates, at: Ints, reason: WaitReason) -> WaitExplanations:
    """The same of all of these positions, with no numbers to it."""
    nothing: Floats = np.zeros(len(at))
    return WaitExplanations(contest.rows[at], np.full(len(at), reason, np.int64), nothing, nothing)
