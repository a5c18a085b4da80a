"""KV residency when device memory is short: ALISE (Zhao et al., 2024), §3.3, Alg. 2.

Pure: takes resident requests and pool sizes, returns transfers. An eviction rule decides whether
one request's KV is kept, offloaded or dropped; the walk over all requests, most urgent first, is
the same for each rule.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from services.core import Residency
from services.costs import KVCosts


@dataclass(frozen=True, slots=True)
class Resident:
    """A resident request. Block counts are device blocks."""

    request_id: str
    wait_s: float  # expected time until it runs
    runs: bool  # admitted: it may be in the next step
    on_device: bool  # its KV is on the device
    tokens: int  # tokens of KV, in either pool
    need_blocks: int  # for its KV and its output until its next slice


@dataclass(frozen=True, slots=True)
class PoolRoom:
    """Capacity of the device pool, and free tokens of the host pool."""

    device_blocks: int
    host_free_tokens: int


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Requests to offload, then to prefetch, each in this order."""

    offload: tuple[str, ...] = ()
    prefetch: tuple[str, ...] = ()


# Arguments: tokens of KV, expected wait in s (infinite if unknown), costs.
EvictionRule = Callable[[int, float, KVCosts], Residency]


def recompute(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """Drops the KV; it is recomputed when the request runs again."""
    return Residency.DROP


def defer(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """Keeps the KV; later requests wait until memory is free."""
    return Residency.KEEP


def swap(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """Offloads to host memory unless the request runs before the round trip completes."""
    return Residency.OFFLOAD if costs.swap_s(tokens) <= wait_s else Residency.KEEP


def cost(tokens: int, wait_s: float, costs: KVCosts) -> Residency:
    """Swaps or recomputes, whichever is cheaper for this request."""
    if costs.recompute_s(tokens) < costs.swap_s(tokens):
        return Residency.DROP
    return swap(tokens, wait_s, costs)


RESIDENCIES: dict[str, EvictionRule] = {
    "recompute": recompute,
    "drop": recompute,  # when memory is short; the plan itself drops the KV of paused requests
    "swap": swap,
    "swap_int8": swap,  # the worker's swap_dtype says how host memory holds it
    "defer": defer,
    "cost": cost,
}
DEFAULT = "recompute"


def plan_residency(
    residents: Iterable[Resident], room: PoolRoom, costs: KVCosts, rule: EvictionRule
) -> ResidencyPlan:
    """Returns the transfers of ALISE's walk, Alg. 2. O(residents).

    The first requests that fit stay on the device or are prefetched; the others are offloaded,
    longest wait first, while the host has room. Requests that the rule would drop keep their KV,
    because they may run before the memory is needed. Running requests are not moved: if they
    outgrow memory, the step composer evicts."""
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
    return ResidencyPlan(tuple(_offloads(beyond, room, costs, rule)), tuple(prefetch))


def _offloads(
    beyond: list[Resident], room: PoolRoom, costs: KVCosts, rule: EvictionRule
) -> Iterable[str]:
    host_free_tokens = room.host_free_tokens
    for resident in sorted(beyond, key=lambda r: -r.wait_s):
        action = rule(resident.tokens, resident.wait_s, costs)
        if action is Residency.OFFLOAD and resident.tokens <= host_free_tokens:
            host_free_tokens -= resident.tokens
            yield resident.request_id
