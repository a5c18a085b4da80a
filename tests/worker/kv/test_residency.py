"""ALISE's residency walk as tables computed by hand: kept, offloaded and returned requests."""

from math import inf

import pytest

from services.core import Residency
from services.costs import KVCosts
from services.worker.kv.residency import (
    RESIDENCIES,
    PoolRoom,
    ResidencyPlan,
    Resident,
    plan_residency,
)

FREE = KVCosts()


def at(
    name: str, wait_s: float, blocks: int, *, runs: bool = False, host: bool = False
) -> Resident:
    """Eight tokens per block."""
    return Resident(name, wait_s, runs, not host, 8 * blocks, blocks)


QUEUE = [
    at("runs", 0, 4, runs=True),
    at("next", 1, 3, host=True),
    at("soon", 2, 3),
    at("late", 9, 2),
    at("last", 7, 2),
]


@pytest.mark.parametrize(
    ("device", "host", "offload", "prefetch"),
    [
        (14, 99, "", "next"),
        (12, 99, "last", "next"),
        (11, 99, "late last", "next"),
        (9, 99, "late last soon", "next"),
        (6, 99, "late last soon", ""),
        (3, 99, "late last soon", ""),
        (6, 4, "late last", ""),
        (6, 3, "late", ""),
        (6, 0, "", ""),
    ],
)
def test_first_fitting_requests_stay_or_return_and_longest_waits_leave_first(
    device, host, offload, prefetch
):
    placing = plan_residency(QUEUE, PoolRoom(device, 8 * host), FREE, RESIDENCIES["swap"])
    assert placing == ResidencyPlan(tuple(offload.split()), tuple(prefetch.split()))


def test_running_requests_keep_their_kv_without_room():
    running = [at("a", 0, 5, runs=True), at("b", 0, 5, runs=True)]
    assert plan_residency(running, PoolRoom(3, 99), FREE, RESIDENCIES["swap"]) == ResidencyPlan()


@pytest.mark.parametrize("residency", ["recompute", "defer"])
def test_dropped_or_deferred_kv_stays_until_needed(residency):
    assert plan_residency(QUEUE, PoolRoom(6, 99), FREE, RESIDENCIES[residency]).offload == ()


def test_swap_longer_than_the_wait_is_not_started():
    """A round trip takes one second per token: `soon` (24 tokens) waits 2 s, the others less than
    16."""
    costs = KVCosts(9.0, 0.5, 0.5)
    assert plan_residency(QUEUE, PoolRoom(6, 99), costs, RESIDENCIES["swap"]).offload == ()
    costs = KVCosts(9.0, 0.2, 0.2)  # 6.4 s for `late` and `last`, 9.6 s for `soon`
    assert plan_residency(QUEUE, PoolRoom(6, 99), costs, RESIDENCIES["swap"]).offload == (
        "late",
        "last",
    )


@pytest.mark.parametrize(
    ("residency", "costs", "how"),
    [
        ("recompute", KVCosts(1.0, 0.1, 0.1), Residency.DROP),
        ("defer", KVCosts(1.0, 0.1, 0.1), Residency.KEEP),
        ("swap", KVCosts(0.1, 1.0, 1.0), Residency.OFFLOAD),
        ("cost", KVCosts(0.1, 1.0, 1.0), Residency.DROP),
        ("cost", KVCosts(1.0, 0.1, 0.1), Residency.OFFLOAD),
        ("cost", FREE, Residency.OFFLOAD),
    ],
)
def test_victim_eviction_table(residency, costs, how):
    assert RESIDENCIES[residency](100, inf, costs) is how
