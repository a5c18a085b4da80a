"""Where KV stays when a device can't hold all of it: ALISE's Algorithm 2 (papers/001 §3.3).

Pure: residents and pools in, moves out. A policy says how one request leaves the device; the walk
over all of them, most urgent first, is the same for every policy.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import inf

from services.core import Residency
from services.costs import KVCosts


@dataclass(frozen=True, slots=True)
class Resident:
    """A request here, as residency sees it. Blocks are of the device unless said otherwise."""

    request_id: str
    wait_s: float  # until it is expected to run
    runs: bool  # admitted: it may be in the next step
    on_device: bool  # its KV is there
    tokens: int  # of KV, wherever it is
    need_blocks: int  # to hold that and what it makes until its next slice


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """What the pools can hold: the device's in all, of the host's what is free."""

    device_blocks: int
    host_free_tokens: int


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """What is to be moved: `offload`, then `prefetch`, each in this order."""

    offload: tuple[str, ...] = ()
    prefetch: tuple[str, ...] = ()


EvictionRule = Callable[[int, float, KVCosts], Residency]  # tokens of KV, expected wait, costs


def recompute(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """Drop it; it is prefilled again when its turn comes."""
    return Residency.DROP


def defer(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """Nobody leaves for memory: who comes later waits until there is room."""
    return Residency.KEEP


def swap(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """To host memory, unless it would be wanted back before it is there and back."""
    return Residency.OFFLOAD if costs.swap_s(tokens) <= wait_s else Residency.KEEP


def cost(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """Whichever is cheaper for this request now: to swap it, or to compute it again."""
    if costs.recompute_s(tokens) < costs.swap_s(tokens):
        return Residency.DROP
    return swap(tokens, wait_s, costs)


RESIDENCIES: dict[str, EvictionRule] = {
    "recompute": recompute,
    "drop": recompute,  # for want of memory; who is paused loses it at once, by the plan
    "swap": swap,
    "defer": defer,
    "cost": cost,
}
DEFAULT = "recompute"


def plan_residency(
    residents: Iterable[Resident], room: PoolRoom, costs: KVCosts, leave: EvictionRule
) -> ResidencyPlan:
    """ALISE's walk: the first that fit stay on the device or return to it, ahead of need; the
    rest are offloaded, the longest waits first, as far as the host has room. What a policy would
    drop is not: it may be wanted before its memory is. Those that run are not touched: when they
    outgrow memory, the step they are in decides. O(residents)."""
    left = room.device_blocks
    prefetch: list[str] = []
    beyond: list[Resident] = []
    for resident in residents:
        fits = resident.need_blocks <= left
        left = left - resident.need_blocks if fits else 0
        if not fits and resident.on_device and not resident.runs:
            beyond.append(resident)
        elif fits and not resident.on_device and resident.tokens:
            prefetch.append(resident.request_id)
    return ResidencyPlan(tuple(_offloads(beyond, room, costs, leave)), tuple(prefetch))


def _offloads(
    beyond: list[Resident], room: PoolRoom, costs: KVCosts, leave: EvictionRule
) -> Iterable[str]:
    host_free_tokens = room.host_free_tokens
    for resident in sorted(beyond, key=lambda r: -r.wait_s):
        how = leave(resident.tokens, resident.wait_s, costs)
        if how is Residency.OFFLOAD and resident.tokens <= host_free_tokens:
            host_free_tokens -= resident.tokens
            yield resident.request_id


def choose_eviction(tokens: int, costs: KVCosts, leave: EvictionRule) -> Residency:
    """How a request leaves that must go at once, its wait unknown."""
    return leave(tokens, inf, costs)
