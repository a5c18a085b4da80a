"""Shortest first by the forecast remaining time: its mean (`srtf`), its distribution (`gittins`),
or its mean and tail (`tail`). All preempt; keys are seconds.

With uncertain lengths, the shortest mean is not the best order. A request that is probably short
but may be very long should run first, and lose its slot once it is unlikely to end soon: Gittins'
index. Conversely, a mean inflated by its tail puts requests that may occupy a slot for long behind
others (arXiv 2604.00499).

None of the three prevents the starvation of long requests, so all use the same ageing:
starvation.py.
"""

from collections.abc import Callable, Iterator

import numpy as np

from services.forecast import MAX_POINTS, Floats, Ints
from services.forecasttable import ForecastTable
from services.policies.memory import PolicyMemory
from services.policies.order.pace import Pace, measure_pace
from services.policies.order.ranking import HYSTERESIS, Ranking, limit_preemption
from services.policies.order.starvation import AGEING, find_starving, put_first
from services.policies.parameters import Param, Params
from services.policies.snapshot import SelectedColumns, Snapshot

SIZE = "size_s"
# Inputs of a size, of each request and of all, to compute it again only when one has changed.
SIZE_INPUTS = ("edition", "forecast", "output", "held")
SIZE_PACE = ("size_token_s", "size_context_token_s", "size_prefill_token_s")
BLOCK = 384 * MAX_POINTS  # points at once, so that the intermediate arrays fit in a core's cache
_NO_CHANCE = 1e-300  # probabilities below count as zero

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

    def index_s(lengths: Floats, seconds: Floats, masses: Floats) -> Floats:
        return seconds_per_completion(seconds, masses)

    return known_sizes(snapshot, memory, pace, index_s)


def tail_s(snapshot: Snapshot, params: Params, memory: PolicyMemory, pace: Pace) -> Sized:
    """Mean + `tail_weight` · (CVaR − mean), where CVaR is the mean of the longest `tail_share`.
    O(jobs), and O(64) for each request that changed."""

    def inflated_s(lengths: Floats, seconds: Floats, masses: Floats) -> Floats:
        mean_s = _sum_rows(masses * seconds)
        worst_s = mean_of_longest(seconds, masses, params["tail_share"])
        inflated_s: Floats = mean_s + params["tail_weight"] * (worst_s - mean_s)
        return inflated_s

    return known_sizes(snapshot, memory, pace, inflated_s)


def known_sizes(
    snapshot: Snapshot,
    memory: PolicyMemory,
    pace: Pace,
    size: Callable[[Floats, Floats, Floats], Floats],
) -> Sized:
    """`size` of each row's forecast lengths, remaining times and masses, cached with its inputs:
    computed again only if an input has changed."""
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
    for at in _blocks((~same).nonzero()[0], jobs, snapshot.forecasts):
        sized[at] = size(*pace.spread_s(jobs.select(at), snapshot.forecasts))
    columns = {name: now.astype(float) for name, now in zip(SIZE_INPUTS, inputs, strict=True)}
    memory = memory.with_numbers(**dict(zip(SIZE_PACE, paces, strict=True)))
    return sized, {SIZE: sized, **columns}, memory


def _blocks(at: Ints, jobs: SelectedColumns, forecasts: ForecastTable) -> Iterator[Ints]:
    """These positions in blocks of about BLOCK points. Many of them are ordered by the points that
    they have passed: a block leaves out those that all of it have."""
    if len(at) * MAX_POINTS <= BLOCK:
        yield from (at,) if len(at) else ()
        return
    passed = forecasts.passed(jobs.forecast[at], jobs.output[at])
    order = passed.argsort(kind="stable")
    at, passed = at[order], passed[order]
    first = 0
    while first < len(at):
        last = first + BLOCK // (MAX_POINTS - int(passed[first]))
        yield at[first:last]
        first = last


def seconds_per_completion(seconds: Floats, masses: Floats) -> Floats:
    """min over d of E[min(S, d)] / P(S ≤ d), the reciprocal of the Gittins index.

    d ranges over each row's positive, ascending seconds: between two of them P does not change, so
    that the minimum is at one of them.
    """
    chance = np.cumsum(masses, axis=1)
    spent = np.cumsum(masses * seconds, axis=1)
    spent += seconds * (1.0 - chance)
    spent /= np.maximum(chance, _NO_CHANCE)
    best: Floats = spent.min(axis=1)
    return best


def mean_of_longest(seconds: Floats, masses: Floats, share: float) -> Floats:
    """The mean of the longest `share` of each row's mass (CVaR), splitting a point's mass if
    needed; 0 < share ≤ 1."""
    chance = np.cumsum(masses, axis=1)
    beyond = np.minimum(np.maximum(chance - (1.0 - share), 0.0), masses)
    mean: Floats = _sum_rows(beyond * seconds) / share
    return mean


def _sum_rows(values: Floats) -> Floats:
    """The sum of each row, in order: leading zeros do not change its rounding."""
    total: Floats = values.cumsum(axis=1)[:, -1]
    return total


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
