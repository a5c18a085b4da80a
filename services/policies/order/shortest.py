"""Shortest first by the forecast remaining time: its mean (`srtf`), its distribution (`gittins`),
or its mean and tail (`tail`). All preempt; keys are seconds.

With uncertain lengths, the shortest mean is not the best order. A request that is probably short
but may be very long should run first, and lose its slot once it is unlikely to end soon: Gittins'
index. Conversely, a mean inflated by its tail puts requests that may occupy a slot for long behind
others (arXiv 2604.00499).

None of the three prevents the starvation of long requests, so all use the same ageing:
starvation.py.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np

from services.forecast import MAX_POINTS, Floats
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Pace, Spread, measure_pace
from services.policies.order.ranking import HYSTERESIS, Ranking, limit_preemption
from services.policies.order.starvation import AGEING, find_starving, put_first
from services.policies.parameters import Param, Params
from services.policies.snapshot import Snapshot

SIZE = "size_s"
# Inputs of a size, of each request and of all, to compute it again only when one has changed.
SIZE_INPUTS = ("edition", "forecast", "output", "held")
SIZE_PACE = ("size_token_s", "size_context_token_s", "size_prefill_token_s")
WINDOW = 8  # points of each request at once: most indices are known after these
ROWS = 2_048  # requests at once, so that the intermediate arrays fit in a core's cache
_NO_GAIN = 1e-300  # gains below count as zero

PARAMS = {**AGEING, **HYSTERESIS}
# The weight of the tail beyond the mean, and the share of mass that is the tail.
TAIL_PARAMS = {
    "tail_weight": Param(0.5, 0.0, 100.0),
    "tail_share": Param(0.1, 1e-3, 1.0),
    **PARAMS,
}


Sized = tuple[Floats, dict[str, Floats], PolicyMemory]
Size = Callable[[Snapshot, Params, PolicyMemory, Pace], Sized]
"""→ the size of each row in seconds, the columns to remember, and the memory so far."""


def mean_s(snapshot: Snapshot, params: Params, memory: PolicyMemory, pace: Pace) -> Sized:
    """The mean remaining time, given the current output. O(jobs)."""
    return pace.expected_s(snapshot.live), {}, memory


def gittins_s(snapshot: Snapshot, params: Params, memory: PolicyMemory, pace: Pace) -> Sized:
    """The reciprocal of Gittins' index: the least expected seconds per completion. O(jobs), and
    O(64) for each request that changed."""

    return known_sizes(snapshot, memory, pace, least_ratio)


def tail_s(snapshot: Snapshot, params: Params, memory: PolicyMemory, pace: Pace) -> Sized:
    """Mean + `tail_weight` · (CVaR − mean), where CVaR is the mean of the longest `tail_share`.
    O(jobs), and O(64) for each request that changed."""

    def inflated_s(count: int, spread: Spread) -> Floats:
        _, seconds, masses = spread(np.arange(count), 0, MAX_POINTS)
        mean_s = running_sums(masses * seconds)[-1]
        worst_s = mean_of_longest(seconds, masses, params["tail_share"])
        inflated_s: Floats = mean_s + params["tail_weight"] * (worst_s - mean_s)
        return inflated_s

    return known_sizes(snapshot, memory, pace, inflated_s)


def known_sizes(
    snapshot: Snapshot,
    memory: PolicyMemory,
    pace: Pace,
    size: Callable[[int, Spread], Floats],
) -> Sized:
    """The `size` of each row, given how many rows and the `Spread` of their forecasts. Cached with
    its inputs: computed again only if one has changed."""
    jobs = snapshot.live
    inputs = (
        snapshot.forecasts.editions(jobs.forecast) + 1,  # 0 stands for an unseen request
        jobs.forecast,
        jobs.output,
        jobs.held,
    )
    paces = pace.token_s, pace.context_token_s, pace.prefill_token_s
    sized, *before = memory.recall((SIZE, *SIZE_INPUTS), jobs.rows, jobs.serial)
    same = np.full(len(jobs), tuple(map(memory.number, SIZE_PACE)) == paces)
    for was, now in zip(before, inputs, strict=True):
        same &= was == now
    changed = (~same).nonzero()[0]
    for first in range(0, len(changed), ROWS):
        at = changed[first : first + ROWS]
        sized[at] = size(len(at), pace.spread_s(jobs.select(at), snapshot.forecasts))
    columns = {name: now.astype(float) for name, now in zip(SIZE_INPUTS, inputs, strict=True)}
    memory = memory.with_numbers(**dict(zip(SIZE_PACE, paces, strict=True)))
    return sized, {SIZE: sized, **columns}, memory


def _completion(masses: Floats, lengths: Floats) -> Floats:
    return masses


def least_ratio(
    count: int, spread: Spread, gained: Callable[[Floats, Floats], Floats] = _completion
) -> Floats:
    """min over d of E[min(S, d)] / E[G; S ≤ d] for each of `count` rows, where `gained` returns
    the gain G of ends with these masses at these lengths; it does not rise with the length. By
    default each end counts 1: the reciprocal of the Gittins index.

    d ranges over each row's ascending seconds: between two of them E[G; S ≤ d] does not change, so
    that the minimum is at one of them. WINDOW points at a time: no later d costs less than the last
    one of these, or gains more than if all others ended there. O(count · points).
    """
    best, at, before = np.full(count, np.inf), np.arange(count), np.zeros((3, count))
    for begin in range(0, MAX_POINTS, WINDOW):
        lengths, seconds, masses = spread(at, begin, WINDOW)
        sums = np.empty((WINDOW, 3, len(at)))
        sums[:, 0], sums[:, 1] = masses, gained(masses, lengths)
        np.multiply(masses, seconds, out=sums[:, 2])
        sums[0] += before
        chance, gain, spent = running_sums(sums).swapaxes(0, 1)
        rest = 1.0 - chance
        cost = seconds * rest
        cost += spent
        best[at] = np.minimum(best[at], (cost / np.maximum(gain, _NO_GAIN)).min(axis=0))
        most = gain[-1] + gained(rest[-1], lengths[-1])
        unknown = (cost[-1] < best[at] * most).nonzero()[0]
        if not len(unknown):
            break
        at, before = at[unknown], sums[-1][:, unknown]
    return best


def mean_of_longest(seconds: Floats, masses: Floats, share: float) -> Floats:
    """The mean of the longest `share` of each column's mass (CVaR), splitting a point's mass if
    needed; 0 < share ≤ 1."""
    chance = running_sums(masses.copy())
    beyond = np.minimum(np.maximum(chance - (1.0 - share), 0.0), masses)
    mean: Floats = running_sums(beyond * seconds)[-1] / share
    return mean


def running_sums(values: Floats) -> Floats:
    """Adds to each entry those before it along the first axis, in place. Several times as fast as
    numpy's cumulative sum, which adds one column after the other."""
    for before, entry in pairwise(values):
        entry += before
    return values


def rank_by_size(size: Size, snapshot: Snapshot, params: Params, memory: PolicyMemory) -> Ranking:
    """By size, except for starved requests. A queued request passes a running one if it is smaller
    by the share `hysteresis`."""
    jobs, split = snapshot.live, len(snapshot.queued)
    rows = jobs.rows
    pace, memory = measure_pace(snapshot, memory)
    size_s, kept, memory = size(snapshot, params, memory, pace)
    remaining_s = pace.expected_s(jobs)
    starved = find_starving(snapshot, split, memory, params["ageing_s"])
    key = put_first(size_s, starved.front, snapshot.now - jobs.arrival_s)
    stays = starved.front[split:] | np.isinf(params["hysteresis"])
    passed = size_s[split:] / (1.0 + params["hysteresis"])
    queue_key = limit_preemption(snapshot, key, passed, stays)
    memory = memory.with_columns(rows, jobs.serial, **starved.columns, **kept)
    return Ranking(rows, split, key, queue_key, remaining_s, starved.lift_s, starved.next_s, memory)
