"""Moves waiting requests with KV to another worker if the shorter wait is worth recomputing
their KV."""

import numpy as np

from services.forecast import Floats, Ints
from services.policies.order.ranking import sorted_order
from services.policies.parameters import Param
from services.policies.place.eligibility import can_serve_each, current_workers
from services.policies.place.loads import work_s
from services.policies.snapshot import NOWHERE, Bools, Candidates, stable_order

PART = 64  # rows that are judged together at first, and twice as many while none moves
MOVE_GAIN = {"move_gain": Param(0.0, 0.0, 1e6)}
ROUNDING = 1.0  # tokens; sums of the same lengths in different orders differ by less


def plan_moves(candidates: Candidates, gain: float) -> Ints:
    """As `current_workers`, with some of the paused requests moved; none at a `gain` of 0.

    A request that must wait where its KV is moves to a worker with room for it, if the work ahead
    of it there is less by more than `gain` times the seconds to recompute its KV; of
    several, to the one where both together are least. Room includes the expected output of the
    request and of those ahead of it; all that run at the other worker are ahead of it. A running
    request never moves. O(paused · workers that have room beside what runs there).
    """
    at = current_workers(candidates)
    jobs, workers = candidates.jobs, candidates.workers
    home = candidates.indices_of(jobs.home)
    known = home != NOWHERE
    paused = (candidates.is_paused_with_kv() & known).nonzero()[0]
    if gain <= 0 or len(workers) < 2 or not len(paused):
        return at
    slots = np.array([worker.max_running for worker in workers])
    rooms = np.array([worker.room_tokens for worker in workers], float)
    finals = jobs.context + jobs.expected_remaining
    runs = (candidates.is_running & known).nonzero()[0]
    seqs = np.bincount(home[runs], minlength=len(workers))
    tokens = np.bincount(home[runs], finals[runs], len(workers))
    free_slots, free_tokens = slots - seqs, rooms - tokens - finals[paused].min() + ROUNDING
    to = ((free_slots > 0) & (free_tokens >= 0)).nonzero()[0]  # others can take none
    if not len(to):
        return at
    queue_key = candidates.queue_key
    last = -np.inf
    for worker in to.tolist():
        own = paused[home[paused] == worker]
        own = own[queue_key[own].argsort(kind="stable")]
        upto = finals[own].cumsum().searchsorted(free_tokens[worker], "right")
        fit = min(int(free_slots[worker]), 1 + int(upto))
        # Behind so many of its own paused requests it has no room for any other.
        last = max(last, float(queue_key[own[fit - 1]]) if fit <= len(own) else np.inf)
    near = paused[queue_key[paused] <= last]
    moved, numbers = _find_moves(candidates, gain, near, to)
    if len(near) < len(paused) and np.isin(home[moved], to).any():  # there is more room than before
        moved, numbers = _find_moves(candidates, gain, paused, to)
    at[moved] = numbers
    return at


def _find_moves(
    candidates: Candidates, gain: float, paused: Ints, to: Ints
) -> tuple[Ints, list[int]]:
    """Which of these paused requests move, and to which workers, by their numbers; `to` are the
    indices of workers that may take any."""
    jobs, workers = candidates.jobs, candidates.workers
    home = candidates.indices_of(jobs.home)
    slots = np.array([worker.max_running for worker in workers])
    rooms = np.array([worker.room_tokens for worker in workers], float)
    finals = jobs.context + jobs.expected_remaining
    runs = (candidates.is_running & (home != NOWHERE)).nonzero()[0]
    rows = np.concatenate([runs, paused])
    waiting_last = rows + len(home) * ~candidates.is_running[rows]
    rows = rows[sorted_order(candidates.queue_key[rows], waiting_last)]
    waits = ~candidates.is_running[rows]
    paused = rows[waits]
    homes = home[paused]
    # Work, tokens and number of requests: at each one's home, and the work elsewhere.
    mine = np.stack([work_s(candidates, rows, home[rows]), finals[rows], np.ones(len(rows))])
    work_there_s = work_s(candidates, paused[:, None], to)
    here, there = _ahead(mine, home[rows], ~waits, to)
    mine = mine[:, waits]
    recompute_s = _recompute_s(candidates, paused, to)
    able = can_serve_each(candidates, [workers[i] for i in to], paused) & (homes[:, None] != to)

    def find_movers(part: slice) -> tuple[Bools, Bools]:
        """Which of these rows move, and to which workers they could."""
        size = finals[paused[part]]
        stays = (here[2, part] < slots[homes[part]]) & (here[1, part] + size <= rooms[homes[part]])
        wins = (there[2, part] < slots[to]) & (there[1, part] + size[:, None] <= rooms[to])
        wins &= able[part] & (here[0, part, None] - there[0, part] > gain * recompute_s[part])
        return ~stays & wins.any(axis=1), wins

    # Most rows stay: parts of them are judged together, again from each move on, because it changes
    # what is ahead of later rows.
    first, part = 0, PART
    moved: list[int] = []
    numbers: list[int] = []
    while first < len(paused):
        moves, wins = find_movers(slice(first, first + part))
        if not moves.any():
            first, part = first + part, 2 * part
            continue
        part = PART
        nth = first + int(moves.argmax())
        cost_s = there[0, nth] + recompute_s[nth]
        chosen = int(np.where(wins[nth - first], cost_s, np.inf).argmin())
        moved.append(int(paused[nth]))
        numbers.append(workers[to[chosen]].number)
        leaves, enters = mine[:, nth, None], mine[:, nth, None].copy()
        enters[0] = work_there_s[nth, chosen]
        later, first = slice(nth + 1, None), nth + 1
        there[:, later, to == homes[nth]] -= leaves[..., None]
        there[:, later, chosen] += enters
        here[:, later] -= leaves * (homes[later] == homes[nth])
        here[:, later] += enters * (homes[later] == to[chosen])
    return np.array(moved, np.int64), numbers


def _recompute_s(candidates: Candidates, at: Ints, to: Ints) -> Floats:
    """Seconds to recompute the KV of each of these at each worker of `to`, (at, to)."""
    missing = candidates.jobs.context[at][:, None]
    if candidates.cached.size:
        missing = np.maximum(missing - candidates.cached[at[:, None], to], 0)
    seconds: Floats = missing * np.array([candidates.workers[i].cost.prefill_token_s for i in to])
    return seconds


def _ahead(mine: Floats, home: Ints, runs: Bools, to: Ints) -> tuple[Floats, Floats]:
    """What is served before each paused request at its home, (values, paused), and at each other
    worker of `to`, (values, paused, to). `mine` are values of the requests, (values, requests), in
    turn. At home those with an earlier turn count; elsewhere, all that run there and the paused
    ones there with an earlier turn. O(requests + paused · to)."""
    order = stable_order(home)
    nth = np.empty(len(order), np.int64)
    nth[order] = np.arange(len(order)) - home[order].searchsorted(home[order])

    def sums(these: Bools) -> Floats:
        """Of the first `nth` at each worker, (values, workers, nth)."""
        totals = np.zeros((len(mine), max(home.max(), to.max()) + 1, nth.max() + 2))
        totals[:, home, nth + 1] = np.where(these, mine, 0.0)
        return totals.cumsum(axis=2, out=totals)

    running, waiting, paused = sums(runs), sums(~runs), (~runs).nonzero()[0]
    homes, nths = home[paused], nth[paused]
    here = running[:, homes, nths] + waiting[:, homes, nths]
    there = np.where(homes[:, None] == to, mine[:, paused, None], 0.0).cumsum(axis=1)
    there += running[:, to, -1][:, None]
    return here, there
