"""Tenant shares: worked examples and a reference implementation."""

from collections.abc import Mapping, Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import certain
from services.policies.order.fairness import is_over_share
from services.policies.snapshot import Snapshot
from tests.policies.made_snapshots import jobs, node, snapshots, table


def over(
    tokens: Mapping[int, Sequence[tuple[int, int]]], room: int, places: int = 99, **weights: float
) -> list[int]:
    """Return the rows over their share; `tokens` maps each tenant to (prompt, expected) per waiting
    request."""
    rows = [(name, *each) for name, some in tokens.items() for each in some]
    tenant, prompt, total = np.array(rows).reshape(-1, 3).T
    weight = [weights.get(f"t{name}", 1.0) for name in tenant]
    made = jobs(len(rows), tenant=tenant, prompt=prompt, total=total.astype(float), weight=weight)
    every = np.arange(len(rows))
    snapshot = Snapshot(0.0, made, every, np.arange(0), (node(1, room, places),), table(certain(9)))
    return np.flatnonzero(is_over_share(snapshot, every, len(rows), every.astype(float))).tolist()


def test_tenant_share_is_proportional_to_weight() -> None:
    """Each of two tenants has a share of 50 of 100 tokens: two of four requests of the first
    fit."""
    assert over({1: [(10, 10)] * 4, 2: [(10, 10)]}, 100) == [2, 3]
    # With three times the weight the share is 75: three fit.
    assert over({1: [(10, 10)] * 4, 2: [(10, 10)]}, 100, t1=3.0) == [3]


def test_tenant_has_a_share_of_running_requests() -> None:
    """Each of two tenants has 3 of 6 places; with twice the weight, the first has 4. A tenant has
    at least one."""
    assert over({1: [(1, 1)] * 6, 2: [(1, 1)]}, 100, places=6) == [3, 4, 5]
    assert over({1: [(1, 1)] * 6, 2: [(1, 1)]}, 100, places=6, t1=2.0) == [4, 5]
    assert over({1: [(1, 1)] * 2, 2: [(1, 1)]}, 100, places=1) == [1]


def test_single_tenant_has_no_share_limit() -> None:
    assert over({1: [(10, 10)] * 9}, 100) == []


def test_tenants_all_above_share_are_not_limited() -> None:
    assert over({1: [(10, 50)], 2: [(10, 50)]}, 100) == []


@settings(max_examples=100)
@given(snapshots(), st.integers(0, 1_000))
def test_over_share_matches_reference_implementation(snapshot: Snapshot, seed: int) -> None:
    """Count running requests, then waiting ones in order, one at a time."""
    rng = np.random.default_rng(seed)
    count = len(snapshot.jobs)
    tenant = rng.integers(0, 3, count)
    weight = np.array([1.0, 2.0, 0.5])[tenant]
    columns = {name: getattr(snapshot.jobs, name) for name in snapshot.jobs.__slots__}
    made = jobs(count, **(columns | {"tenant": tenant, "weight": weight}))
    board_ = Snapshot(100.0, made, snapshot.queued, snapshot.running, snapshot.workers, table())
    rows = np.concatenate([board_.queued, board_.running])
    split = len(board_.queued)
    key = rng.random(len(rows))
    found = is_over_share(board_, rows, split, key)
    assert not found[split:].any()
    present = set(tenant[rows].tolist())
    room = sum(worker.room_tokens for worker in board_.workers)
    places = sum(worker.max_running for worker in board_.workers)
    total_weight = sum({0: 1.0, 1: 2.0, 2: 0.5}[name] for name in present)
    need = made.prompt + made.total
    beyond: dict[int, bool] = {}
    for name in present:
        used = sum(need[r] for r in rows[split:].tolist() if tenant[r] == name)
        mine = sorted((i for i in range(split) if tenant[rows[i]] == name), key=lambda i: key[i])
        part = {0: 1.0, 1: 2.0, 2: 0.5}[name] / total_weight
        runs = sum(tenant[row] == name for row in rows[split:].tolist())
        for i in mine:
            used += need[rows[i]]
            runs += 1
            beyond[i] = bool(used > part * room or runs > max(1.0, part * places))
    for i, is_beyond in beyond.items():
        others = any(not b for j, b in beyond.items() if tenant[rows[j]] != tenant[rows[i]])
        assert found[i] == (is_beyond and others)
