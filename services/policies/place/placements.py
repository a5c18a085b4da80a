"""Which worker a waiting request queues for: filter, score, pick."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from services.forecast import Ints
from services.policies.parameters import Param, Params
from services.policies.place.assignment import Assignment, assign
from services.policies.place.eligibility import current_workers
from services.policies.place.loads import loads_in_seconds, loads_in_tokens, loads_less_cached
from services.policies.place.migration import MOVE_GAIN, plan_moves
from services.policies.snapshot import Candidates


@dataclass(frozen=True, slots=True)
class Placement:
    """`assign` returns the worker number of every candidate, or NOWHERE. `cached`: it uses prefix
    caches. `by_turn`: it keeps its turns although another worker is idle."""

    assign: Callable[[Candidates, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    cached: bool = False
    by_turn: bool = False


def least_load(candidates: Candidates, params: Params) -> Ints:
    """Waiting requests in order, each to the worker that would finish first, by tokens over its
    speed."""
    loads = partial(loads_in_tokens, candidates)
    return assign(candidates, current_workers(candidates), loads)


def round_robin(candidates: Candidates, params: Params) -> Ints:
    """In turns, whatever the loads. Each round begins one further on, so that requests that arrive
    alone do not always get the same worker."""
    loads = partial(loads_in_tokens, candidates)
    return assign(candidates, current_workers(candidates), loads, Assignment.next_in_turn)


def max_min(candidates: Candidates, params: Params) -> Ints:
    """SCLS' offloading (Cheng et al., 2024, §4.4): the longest estimate first, each to the least
    loaded worker. The paper adds an estimate at dispatch and removes it at completion; here the
    load is computed from the remaining work in each round. The order decides which requests get a
    slot; among those the longest are assigned first."""
    at = plan_moves(candidates, params["move_gain"])
    return assign(candidates, at, partial(loads_in_seconds, candidates, at), longest_first=True)


def prefix_aware(candidates: Candidates, params: Params) -> Ints:
    """Waiting requests in order, each to the worker with the least load including it, minus
    `prefix_weight` times the prefill that its cached prefix saves."""
    at = plan_moves(candidates, params["move_gain"])
    loads = partial(loads_less_cached, candidates, at, params["prefix_weight"])
    return assign(candidates, at, loads)


def max_min_prefix(candidates: Candidates, params: Params) -> Ints:
    """The longest first, each to the worker that `prefix_aware` prefers."""
    at = plan_moves(candidates, params["move_gain"])
    loads = partial(loads_less_cached, candidates, at, params["prefix_weight"])
    return assign(candidates, at, loads, longest_first=True)


PREFIX = MOVE_GAIN | {"prefix_weight": Param(1.0, 0.0, 1e3)}
PLACEMENTS: dict[str, Placement] = {
    "least_load": Placement(least_load),
    "round_robin": Placement(round_robin, by_turn=True),
    "max_min": Placement(max_min, MOVE_GAIN),
    "prefix_aware": Placement(prefix_aware, PREFIX, cached=True),
    "max_min_prefix": Placement(max_min_prefix, PREFIX, cached=True),
}
