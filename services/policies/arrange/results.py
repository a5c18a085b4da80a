"""Results common to both arrangements: the workers' decisions, and why other requests wait."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitExplanations, WaitReason, WorkerDecision
from services.policies.preset import Preset
from services.policies.snapshot import Bools, Candidates, distinct, stable_order
from services.policies.victim import VICTIMS


class WorkerParts(NamedTuple):
    """The workers' parts of an arrangement in columns. `at` are candidate positions in any
    order, and `which` the index of each one's worker. Parallel to them are the output at which each
    stops if it runs next, and which of them do. `numbers`, the expected KV `peaks` and `lockstep`
    are those of each worker."""

    numbers: Ints
    at: Ints
    which: Ints
    limits: Ints
    runs_next: Bools
    peaks: Floats
    lockstep: Bools


def worker_decisions(
    candidates: Candidates, preset: Preset, parts: WorkerParts
) -> tuple[WorkerDecision, ...]:
    """One decision for each worker. Requests that run next are listed most urgent first, and as
    victims in the order of eviction. O(n log n) for all together."""
    at, which, count = parts.at, parts.which, len(candidates.rows)
    runs_next = parts.runs_next
    line, of = at[runs_next], which[runs_next]
    order = (of * count + line).argsort()  # candidates are sorted by urgency
    line, of = line[order], of[order]
    evict = line[(of * count + rank_victims(candidates, preset, line)[line]).argsort()]
    stops = (~runs_next & candidates.is_running[at]).nonzero()[0]
    stops = stops[stable_order(which[stops])]
    limits = parts.limits[runs_next][order]
    runs, pauses, victims = (candidates.rows[each] for each in (line, at[stops], evict))
    bounds = np.arange(len(parts.numbers) + 1)
    ends, pause_ends = of.searchsorted(bounds), which[stops].searchsorted(bounds)
    each_worker = zip(
        parts.numbers.tolist(),
        pairwise(ends.tolist()),
        pairwise(pause_ends.tolist()),
        parts.peaks.tolist(),
        parts.lockstep.tolist(),
        strict=True,
    )
    decisions = []
    for number, (begin, end), (first, last), peak, lockstep in each_worker:
        own = slice(begin, end)
        columns = runs[own], limits[own], pauses[first:last], victims[own]
        decisions.append(WorkerDecision(number, *columns, peak, lockstep))
    return tuple(decisions)


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
