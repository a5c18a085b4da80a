"""One worker's line, filled while memory and places last: who of it runs next.

The running stand in the line with those who wait. Those ahead of everybody who waits stay,
whatever memory says. Behind them the line is taken in order until one does not fit; nobody who
waits passes that one, but who runs behind it goes on if there is still room beside those who came
in and those who run before it. So somebody is paused only where one who stood ahead of it came in
and took its room: that is all there is to preemption.

Where a form asks of the running too that what they are granted next fits (`Demand.due`), those that
are due for it don't simply stay: they are taken in their turn, and paused where there is no room.
"""

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.policies.decision import WaitReason
from services.policies.form.demand import Demand
from services.policies.snapshot import Bools


@dataclass(frozen=True, slots=True)
class Filled:
    """Parallel to the line: who runs next; and of each who waits, why, and its numbers. `peak`
    is the memory foreseen, in tokens."""

    run: Bools
    reasons: Ints
    a: Floats
    b: Floats
    peak: float


_NOBODY = (WaitReason.BLOCKED, 0.0, 0.0)  # there is nobody to tell


def fill(runs: Bools, demand: Demand, places: int, alone: bool) -> Filled:
    """`runs` says who of the line does now. `alone`: on an idle worker the first comes in though
    it passes the policy's limit, for no later round would find more room for it."""
    count, places = len(runs), min(places, demand.places)
    stays = runs if demand.due is None else runs & ~demand.due
    base = int(np.argmin(stays)) if not stays.all() else count
    reach = max(0, min(count, places) - base)
    fits, need = demand.longest(np.arange(count), base, reach)
    if fits < reach and base + fits == 0 and not stays.any() and (alone or runs[0]):
        fits = 1
    front = base + fits
    entering = np.flatnonzero(~runs[:front])
    run = runs.copy()
    if len(entering) or stays is not runs:
        run[:front] = True
        run[front:] = _behind(runs, demand, front, places)
    waits = np.flatnonzero(~runs[front:]) + front
    if fits < reach:
        # Where the one that does not fit runs so far, those who wait are only behind it.
        waits = waits[waits == front]
        stopped = demand.refusal(np.arange(front + 1), need(fits + 1)) if len(waits) else _NOBODY
    else:
        stopped = (WaitReason.SLOTS, float(np.count_nonzero(run)), float(places))
    peak = _peak(demand, run) if run[front:].any() else need(fits)
    return _told(run, entering, waits, peak, demand.limit, stopped)


def fill_places(runs: Bools, holds: Bools, demand: Demand, places: int, alone: bool) -> Filled:
    """The same where a paused job's KV keeps its device memory (ALISE's strawman Defer): pausing
    makes room among the places only. All who hold KV keep it; memory must be found for those who
    have none yet, in their order, and the places go down the line."""
    fresh, places = np.flatnonzero(~holds), min(places, demand.places)
    order = np.concatenate([np.flatnonzero(holds), fresh])
    base = len(order) - len(fresh)
    fits, need = demand.longest(order, base, min(len(fresh), places))
    if fits == 0 and alone and not holds.any() and places > 0:
        fits = min(1, len(fresh))
    able = holds.copy()
    able[fresh[:fits]] = True
    run = able & (np.cumsum(able) <= places)
    entering = np.flatnonzero(run & ~runs)
    waits = np.flatnonzero(~run & ~runs)
    if fits < min(len(fresh), places) and len(waits) and waits[0] == fresh[fits]:
        stopped = demand.refusal(order[: base + fits + 1], need(fits + 1))
    else:
        stopped = (WaitReason.SLOTS, float(np.count_nonzero(run)), float(places))
    return _told(run, entering, waits, need(fits), demand.limit, stopped)


def _behind(runs: Bools, demand: Demand, front: int, places: int) -> Bools:
    """Who of those behind the first `front` goes on: in order, everyone that runs and for whom
    there is still room beside those who came in."""
    kept, later = np.arange(front), np.flatnonzero(runs[front:]) + front
    while len(later) and len(kept) < places:
        order = np.concatenate([kept, later])
        more, _ = demand.longest(order, len(kept), min(len(later), places - len(kept)))
        kept, later = order[: len(kept) + more], later[more + 1 :]
        # Who could not stay in any case is not asked about one by one.
        later = later[demand.able(kept, later)]
    goes_on = np.zeros(len(runs), bool)
    goes_on[kept] = True
    return goes_on[front:]


def _peak(demand: Demand, run: Bools) -> float:
    """What these need together."""
    rows = np.flatnonzero(run)
    return demand.longest(rows, len(rows), 0)[1](0)


def _told(
    run: Bools,
    entering: Ints,
    waits: Ints,
    peak: float,
    limit: float,
    stopped: tuple[WaitReason, float, float],
) -> Filled:
    reasons = np.full(len(run), WaitReason.BLOCKED, np.int64)
    a, b = np.arange(len(run), dtype=float), np.zeros(len(run))
    reasons[entering], a[entering], b[entering] = WaitReason.ADMITTED, peak, limit
    if len(waits):
        reasons[waits[0]], a[waits[0]], b[waits[0]] = stopped
    return Filled(run, reasons, a, b, peak)
