"""Which worker a waiting job stands in line for: filter, score, pick."""

from collections.abc import Callable
from dataclasses import dataclass, field

from services.forecast import Ints
from services.policies.parameters import Param, Params
from services.policies.place.assignment import deal, next_in_turn
from services.policies.place.eligibility import settled
from services.policies.place.loads import by_seconds, by_seconds_saved, by_tokens
from services.policies.place.migration import MOVE_GAIN, moved
from services.policies.snapshot import Candidates


@dataclass(frozen=True, slots=True)
class Placement:
    """`deal` says the number of the worker for every row of a contest, or NOWHERE. `cached`:
    whether it looks at what each would find cached. `by_turn`: whether it keeps to its turns though
    another worker is idle."""

    deal: Callable[[Candidates, Params], Ints]
    params: dict[str, Param] = field(default_factory=dict)
    cached: bool = False
    by_turn: bool = False


def least_load(contest: Candidates, params: Params) -> Ints:
    """Those who wait, in order, each to the worker that would be through the soonest, by tokens
    over its speed."""
    return deal(contest, settled(contest), by_tokens(contest))


def round_robin(contest: Candidates, params: Params) -> Ints:
    """In turns, whatever they have to do. Each round begins one further on, so that who comes
    alone does not always find the same one first."""
    return deal(contest, settled(contest), by_tokens(contest), next_in_turn)


def max_min(contest: Candidates, params: Params) -> Ints:
    """SCLS' offloading (papers/003 §4.4): the longest estimated first, each to the worker with the
    least load. The paper adds an estimate at dispatch and takes it away at completion; here the
    load is what everyone there still takes, reckoned anew each round. Who gets a place at all is
    the order's affair: the longest are dealt first among those."""
    at = moved(contest, params["move_gain"])
    return deal(contest, at, by_seconds(contest, at), longest_first=True)


def prefix_aware(contest: Candidates, params: Params) -> Ints:
    """Those who wait, in order, each to where the load with it, less `prefix_weight` times the
    prefill that its cached beginning saves, is least."""
    at = moved(contest, params["move_gain"])
    loads = by_seconds_saved(contest, at, params["prefix_weight"])
    return deal(contest, at, loads)


def max_min_prefix(contest: Candidates, params: Params) -> Ints:
    """The longest first, each to where `prefix_aware` would have it."""
    at = moved(contest, params["move_gain"])
    loads = by_seconds_saved(contest, at, params["prefix_weight"])
    return deal(contest, at, loads, longest_first=True)


PREFIX = MOVE_GAIN | {"prefix_weight": Param(1.0, 0.0, 1e3)}
PLACEMENTS: dict[str, Placement] = {
    "least_load": Placement(least_load),
    "round_robin": Placement(round_robin, by_turn=True),
    "max_min": Placement(max_min, MOVE_GAIN),
    "prefix_aware": Placement(prefix_aware, PREFIX, cached=True),
    "max_min_prefix": Placement(max_min_prefix, PREFIX, cached=True),
}
