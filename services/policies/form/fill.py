"""Fills workers' queues while memory and slots last: which of their requests run next.

Running requests stand in the queue with waiting ones. Those ahead of every waiting request stay,
whatever the memory. Behind them the queue is taken in order until one does not fit. No waiting
request passes that one, but a running request behind it continues if there is room beside the
admitted requests and the running ones before it. A request is therefore paused only if one ahead of
it was admitted and took its memory: preemption needs no other rule.

Where a form requires that a running request's next grant fits (`Demand.due`), such requests do not
simply stay: they are taken in order, and paused without room.

All queues are filled together, in a few passes over all of their jobs.
"""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitReason
from services.policies.form.demand import Demand, Need
from services.policies.form.lines import Lines
from services.policies.snapshot import Bools, stable_order


@dataclass(frozen=True, slots=True)
class FillResult:
    """Parallel to the jobs of the queues: which run next, and the reason and its numbers for each
    waiting one. `peaks` is the forecast memory of each queue in tokens."""

    runs_next: Bools
    reasons: Ints
    first_values: Floats
    second_values: Floats
    peaks: Floats

    @staticmethod
    def all_run(jobs: int, queues: int) -> "FillResult":
        """Running requests, all of which continue."""
        nothing = np.zeros(jobs)
        return FillResult(
            np.ones(jobs, bool), np.zeros(jobs, np.int64), nothing, nothing, np.zeros(queues)
        )

    def select(self, kept: Bools | Ints) -> "FillResult":
        """Some of the jobs, of the same queues."""
        return FillResult(
            self.runs_next[kept],
            self.reasons[kept],
            self.first_values[kept],
            self.second_values[kept],
            self.peaks,
        )

    def followed_by(self, other: "FillResult", peaks: Floats) -> "FillResult":
        """The jobs of both; `peaks` are those of all queues."""
        return FillResult(
            np.concatenate([self.runs_next, other.runs_next]),
            np.concatenate([self.reasons, other.reasons]),
            np.concatenate([self.first_values, other.first_values]),
            np.concatenate([self.second_values, other.second_values]),
            peaks,
        )


def fill(lines: Lines, is_running: Bools, demand: Demand, slots: Ints, alone: Bools) -> FillResult:
    """`lines` are all jobs of the queues; `is_running` marks those that run now. `alone`: on an
    idle worker the first request is admitted even above the policy's limit, because no later round
    would find more room for it. A few passes over the jobs, O(jobs) each, and one more for each
    running request of a queue that would fit alone, but not beside those before it."""
    nth, which, sizes = lines.nth, lines.which, lines.sizes
    waits, (slots, slots_reasons) = ~is_running, demand.within(slots)
    asks = waits if demand.due is None else waits | demand.due  # the others simply stay
    base = lines.first(asks)
    reach = np.maximum(np.minimum(sizes, slots) - base, 0)
    head = lines.upto(base + reach + 1)
    fits, need = demand.count_fitting(head, base, reach)
    opens = (fits < reach) & (base + fits == 0)
    if opens.any():
        opens &= alone | (lines.count(is_running & (nth == 0)) > 0)
        fits[opens & (lines.count(~asks) == 0)] = 1
    front, stopped = base + fits, fits < reach
    ahead = nth < front[which]
    # The first that asks is a waiting one, unless running ones are due.
    changes = fits > 0 if demand.due is None else np.ones(len(sizes), bool)
    here = changes[which]
    runs_next = np.where(here, ahead, is_running)
    behind = here & is_running & ~ahead
    if behind.any():
        kept, later = lines.select(here & ahead), lines.select(behind)
        runs_next[_behind(demand, kept, later, slots)] = True
    peaks = _peaks(lines, runs_next, ahead, demand, need, fits)
    # Running requests up to the one that does not fit stay; waiting ones are only behind it.
    full = lines.places(lines.first(waits, front), ~stopped)
    refused = lines.places(front, stopped)
    refused = refused[waits[refused]]
    refusal = demand.refusal(head, front, need(fits + stopped)) if len(refused) else None
    room = slots, slots_reasons
    return _explained(
        lines, runs_next, waits & ahead, peaks, demand.limits, full, room, refused, refusal
    )


def fill_slots(
    lines: Lines, is_running: Bools, holds: Bools, demand: Demand, slots: Ints, alone: Bools
) -> FillResult:
    """The same where a paused request's KV keeps its device memory (ALISE's strawman Defer).
    Pausing frees only slots. Every request with KV keeps it; requests without need memory, in
    their order; then slots are given down the queue."""
    which, (slots, slots_reasons) = lines.which, demand.within(slots)
    base = lines.count(holds)
    fresh = lines.sizes - base
    order = Lines(stable_order(2 * which + ~holds), which, lines.sizes)
    reach = np.minimum(fresh, slots)
    head = order.upto(base + reach + 1)
    fits, need = demand.count_fitting(head, base, reach)
    opens = (fits == 0) & alone & (base == 0) & (slots > 0)
    fits[opens] = np.minimum(1, fresh[opens])
    front, stopped = base + fits, fits < reach
    able = np.zeros(len(which), bool)
    able[order.jobs[order.nth < front[which]]] = True
    runs_next = able & (lines.running_sums(able) <= slots[which])
    waits = ~is_running & ~runs_next
    at_front = np.zeros(len(which), bool)
    at_front[order.jobs[order.places(front, stopped)]] = True
    first = lines.first(waits)
    first = lines.places(first, first < lines.sizes)
    refused, full = first[at_front[first]], first[~at_front[first]]
    refusal = demand.refusal(head, front, need(fits + stopped)) if len(refused) else None
    enters, room = runs_next & ~is_running, (slots, slots_reasons)
    return _explained(
        lines, runs_next, enters, need(fits), demand.limits, full, room, refused, refusal
    )


def _behind(demand: Demand, kept: Lines, later: Lines, slots: Ints) -> Ints:
    """Running requests `later`, behind the front of their queues, that continue: in order, each for
    which there is room beside the admitted ones."""
    continuing: list[Ints] = []
    while True:
        opens = (later.sizes > 0) & (kept.sizes < slots)
        if not opens.any():
            return np.concatenate([*continuing, later.jobs[:0]])
        kept, later = kept.select(opens[kept.which]), later.select(opens[later.which])
        most = np.minimum(later.sizes, np.maximum(slots - kept.sizes, 0))
        more, _ = demand.count_fitting(kept.followed_by(later), kept.sizes, most)
        taken = later.select(later.nth < more[later.which])
        continuing.append(taken.jobs)
        kept = kept.followed_by(taken)
        later = later.select(later.nth > more[later.which])
        # Requests that could not stay in any case are not checked one by one.
        later = later.select(demand.able(kept, later))


def _peaks(
    lines: Lines, runs_next: Bools, ahead: Bools, demand: Demand, need: Need, fits: Ints
) -> Floats:
    """Tokens that the jobs of each queue which run next need together: of `need` where all of these
    are ahead of the front."""
    peaks, later = need(fits), runs_next & ~ahead
    if later.any():
        more = lines.count(later) > 0
        rows = lines.select(runs_next & more[lines.which])
        none = np.zeros_like(rows.sizes)
        peaks = np.where(more, demand.count_fitting(rows, rows.sizes, none)[1](none), peaks)
    return peaks


def _explained(
    lines: Lines,
    runs_next: Bools,
    enters: Bools,
    peaks: Floats,
    limits: Floats,
    full: Ints,
    room: tuple[Ints, Ints],
    refused: Ints,
    refusal: tuple[Ints, Floats, Floats] | None,
) -> FillResult:
    """The result, with the reasons of the jobs that enter, of those that are first behind all slots
    (`full`), and of the `refused` ones; all others wait behind one of these. `room` are the slots
    of each queue and the reason for their number."""
    which, (slots, slots_reasons) = lines.which, room
    reasons = np.full(len(which), int(WaitReason.BLOCKED))
    first, second = lines.nth.astype(float), np.zeros(len(which))
    entering = enters.nonzero()[0]
    of = which[entering]
    reasons[entering], first[entering], second[entering] = (
        WaitReason.ADMITTED,
        peaks[of],
        limits[of],
    )
    if len(full):
        of = which[full]
        reasons[full], second[full] = slots_reasons[of], slots[of]
        first[full] = lines.count(runs_next)[of]
    if refusal:
        of = which[refused]
        reasons[refused], first[refused], second[refused] = (each[of] for each in refusal)
    return FillResult(runs_next, reasons, first, second, peaks)
