"""Fills one worker's queue while memory and slots last: which of its requests run next.

Running requests stand in the queue with waiting ones. Those ahead of every waiting request stay,
whatever the memory. Behind them the queue is taken in order until one does not fit. No waiting
request passes that one, but a running request behind it continues if there is room beside the
admitted requests and the running ones before it. A request is therefore paused only if one ahead of
it was admitted and took its memory: preemption needs no other rule.

Where a form requires that a running request's next grant fits (`Demand.due`), such requests do not
simply stay: they are taken in order, and paused without room.
"""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitReason
from services.policies.form.demand import Demand
from services.policies.snapshot import Bools


@dataclass(frozen=True, slots=True)
class FillResult:
    """Parallel to the queue: which requests run next, and the reason and its numbers for each
    waiting one. `peak` is the forecast memory in tokens."""

    runs_next: Bools
    reasons: Ints
    first_values: Floats
    second_values: Floats
    peak: float

    def select(self, kept: Bools) -> "FillResult":
        return FillResult(
            self.runs_next[kept],
            self.reasons[kept],
            self.first_values[kept],
            self.second_values[kept],
            self.peak,
        )


_NOT_EXPLAINED = (WaitReason.BLOCKED, 0.0, 0.0)  # no request to explain


def fill(is_running: Bools, demand: Demand, slots: int, alone: bool) -> FillResult:
    """`is_running` marks the requests that run now. `alone`: on an idle worker the first request is
    admitted even above the policy's limit, because no later round would find more room for it."""
    count, slots = len(is_running), min(slots, demand.slots)
    stays = is_running if demand.due is None else is_running & ~demand.due
    base = int(stays.argmin()) if not stays.all() else count
    reach = max(0, min(count, slots) - base)
    fits, need = demand.count_fitting(np.arange(count), base, reach)
    if fits < reach and base + fits == 0 and not stays.any() and (alone or is_running[0]):
        fits = 1
    front = base + fits
    entering = (~is_running[:front]).nonzero()[0]
    runs_next = is_running.copy()
    if len(entering) or stays is not is_running:
        runs_next[:front] = True
        runs_next[front:] = _behind(is_running, demand, front, slots)
    waits = (~is_running[front:]).nonzero()[0] + front
    if fits < reach:
        # Running requests up to the one that does not fit stay; waiting ones are only behind it.
        waits = waits[waits == front]
        stopped = (
            demand.refusal(np.arange(front + 1), need(fits + 1)) if len(waits) else _NOT_EXPLAINED
        )
    else:
        stopped = (WaitReason.SLOTS, float(np.count_nonzero(runs_next)), float(slots))
    peak = _peak(demand, runs_next) if runs_next[front:].any() else need(fits)
    return _explain_filled(runs_next, entering, waits, peak, demand.limit, stopped)


def fill_slots(
    is_running: Bools, holds: Bools, demand: Demand, slots: int, alone: bool
) -> FillResult:
    """The same where a paused request's KV keeps its device memory (ALISE's strawman Defer).
    Pausing frees only slots. Every request with KV keeps it; requests without need memory, in
    their order; then slots are given down the queue."""
    fresh, slots = np.flatnonzero(~holds), min(slots, demand.slots)
    order = np.concatenate([np.flatnonzero(holds), fresh])
    base = len(order) - len(fresh)
    fits, need = demand.count_fitting(order, base, min(len(fresh), slots))
    if fits == 0 and alone and not holds.any() and slots > 0:
        fits = min(1, len(fresh))
    able = holds.copy()
    able[fresh[:fits]] = True
    runs_next = able & (np.cumsum(able) <= slots)
    entering = np.flatnonzero(runs_next & ~is_running)
    waits = np.flatnonzero(~runs_next & ~is_running)
    if fits < min(len(fresh), slots) and len(waits) and waits[0] == fresh[fits]:
        stopped = demand.refusal(order[: base + fits + 1], need(fits + 1))
    else:
        stopped = (WaitReason.SLOTS, float(np.count_nonzero(runs_next)), float(slots))
    return _explain_filled(runs_next, entering, waits, need(fits), demand.limit, stopped)


def _behind(is_running: Bools, demand: Demand, front: int, slots: int) -> Bools:
    """Running requests behind the first `front` that continue: in order, each for which there is
    room beside the admitted ones."""
    kept, later = np.arange(front), np.flatnonzero(is_running[front:]) + front
    while len(later) and len(kept) < slots:
        order = np.concatenate([kept, later])
        more, _ = demand.count_fitting(order, len(kept), min(len(later), slots - len(kept)))
        kept, later = order[: len(kept) + more], later[more + 1 :]
        # Requests that could not stay in any case are not checked one by one.
        later = later[demand.able(kept, later)]
    goes_on = np.zeros(len(is_running), bool)
    goes_on[kept] = True
    return goes_on[front:]


def _peak(demand: Demand, runs_next: Bools) -> float:
    """Tokens that these need together."""
    rows = np.flatnonzero(runs_next)
    return demand.count_fitting(rows, len(rows), 0)[1](0)


def _explain_filled(
    runs_next: Bools,
    entering: Ints,
    waits: Ints,
    peak: float,
    limit: float,
    stopped: tuple[WaitReason, float, float],
) -> FillResult:
    reasons = np.full(len(runs_next), WaitReason.BLOCKED, np.int64)
    first, second = np.arange(len(runs_next), dtype=float), np.zeros(len(runs_next))
    reasons[entering], first[entering], second[entering] = WaitReason.ADMITTED, peak, limit
    if len(waits):
        reasons[waits[0]], first[waits[0]], second[waits[0]] = stopped
    return FillResult(runs_next, reasons, first, second, peak)
