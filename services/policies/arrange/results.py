"""Results common to both arrangements: the workers' decisions, and why other requests wait."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitExplanations, WaitReason, WorkerDecision
from services.policies.preset import Preset
from services.policies.snapshot import Bools, Candidates, distinct
from services.policies.victim import VICTIMS


class WorkerPart(NamedTuple):
    """One worker's part of an arrangement: candidate positions in any order, the output at which
    each stops if it runs next, which of them do, and the KV peak that is expected of these."""

    worker: int  # its number
    at: Ints
    limits: Ints
    runs_next: Bools
    peak_tokens: float = 0.0
    lockstep: bool = False


def worker_decisions(
    candidates: Candidates, preset: Preset, parts: Sequence[WorkerPart]
) -> tuple[WorkerDecision, ...]:
    """One decision for each part. Requests that run next are listed most urgent first, and as
    victims in the order of eviction. O(n log n) for all parts together."""
    if not parts:
        return ()
    at = np.concatenate([part.at for part in parts])
    runs_next = np.concatenate([part.runs_next for part in parts])
    which = np.arange(len(parts)).repeat([len(part.at) for part in parts])
    line, of, count = at[runs_next], which[runs_next], len(candidates.rows)
    order = (of * count + line).argsort()  # candidates are sorted by urgency
    line, of = line[order], of[order]
    evict = line[(of * count + rank_victims(candidates, preset, line)[line]).argsort()]
    stops = (~runs_next & candidates.is_running[at]).nonzero()[0]
    limits = np.concatenate([part.limits for part in parts])[runs_next][order]
    runs, pauses, victims = (candidates.rows[each] for each in (line, at[stops], evict))
    ends = np.arange(1, len(parts) + 1)
    run_ends, pause_ends = of.searchsorted(ends).tolist(), which[stops].searchsorted(ends).tolist()
    decisions, begin, pause_begin = [], 0, 0
    for part, end, pause_end in zip(parts, run_ends, pause_ends, strict=True):
        own, paused = slice(begin, end), pauses[pause_begin:pause_end]
        columns = (runs[own], limits[own], paused, victims[own])
        decisions.append(WorkerDecision(part.worker, *columns, part.peak_tokens, part.lockstep))
        begin, pause_begin = end, pause_end
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
