"""The promise order: classes, requests at risk and tenant shares."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.forecast import Floats, Ints, certain
from services.policies.memory import PolicyMemory
from services.policies.order.fairness import is_over_share
from services.policies.order.promise import PARAMS, promise
from services.policies.order.ranking import CLASS, Ranking
from services.policies.parameters import resolve
from services.policies.snapshot import Snapshot
from tests.policies.made_snapshots import jobs, node, snapshots, table

# A step takes 10 ms for any number of requests; prefill takes almost no time.
COST = CostModel(0.01, 1e-9, 0.0, 0.0)
NOW = 100.0


def board(
    lengths: Sequence[int], split: int, **columns: Sequence[float] | Ints | Floats
) -> Snapshot:
    """Requests of known lengths; those before `split` wait, the others run on the only worker."""
    count = len(lengths)
    runs = np.arange(count) >= split
    plain: dict[str, Sequence[float] | Ints | Floats] = {
        "cap": np.full(count, 1_000),
        "total": np.array(lengths, float),
        "forecast": np.arange(count),
        "home": np.where(runs, 1, -1),
        "held": np.where(runs, 10, 0),
        "arrival_s": np.full(count, NOW),
        "since_s": np.full(count, NOW),
    }
    made = jobs(count, **(plain | columns))
    forecasts = table(*(certain(length) for length in lengths))
    worker = node(1, 10_000, cost=COST)
    return Snapshot(NOW, made, np.arange(split), np.arange(split, count), (worker,), forecasts)


def ranked(snapshot: Snapshot, memory: PolicyMemory | None = None, **params: float) -> Ranking:
    given_params = resolve("promise", PARAMS, {"pressed_s": 1.0, "pressed_share": 1.0} | params)
    return promise(snapshot, given_params, memory or PolicyMemory())


def line(ranking: Ranking) -> list[int]:
    """Rows, most urgent first."""
    order = np.lexsort((ranking.rows, ranking.key))
    return [int(row) for row in ranking.rows[order]]


def test_promise_without_sla_ranks_shortest_first() -> None:
    assert line(ranked(board([50, 20, 90], 3))) == [1, 0, 2]


def test_promise_ranks_request_with_missed_sla_last() -> None:
    """The shortest request arrived 6 s ago with a TTFT of 5 s, so its SLA is missed."""
    snapshot = board([5, 90], 2, arrival_s=[NOW - 6, NOW], ttft_s=[5.0, 5.0])
    assert line(ranked(snapshot)) == [1, 0]


def test_promise_ranks_request_at_risk_first() -> None:
    """One request runs at a time at 10 ms a token. The two shorter ones take 0.4 and 0.6 s before
    the long one, which takes 0.9 s and has 0.5 s left. They have 2 s each, so their slack is 2 -
    0 and 2 - 0.4."""
    snapshot = board([40, 60, 90], 3, arrival_s=[NOW - 3, NOW - 3, NOW - 4.5], ttft_s=[5.0] * 3)
    assert line(ranked(snapshot)) == [2, 0, 1]
    assert line(ranked(snapshot, pressed_share=0.5)) == [0, 1, 2]  # 0.9 of 0.8 s
    assert line(ranked(snapshot, pressed_s=0.3)) == [0, 1, 2]  # the 0.5 s left exceed pressed_s


def test_promise_puts_quickest_requests_at_risk_first_within_available_slack() -> None:
    """The request on time has 1.6 s of slack: 70 and 80 tokens take 1.5 s, and 90 more would exceed
    it."""
    come = [NOW - 3.4, NOW - 4.9, NOW - 4.9, NOW - 4.9]
    snapshot = board([10, 80, 90, 70], 4, arrival_s=come, ttft_s=[5.0] * 4)
    assert line(ranked(snapshot)) == [3, 1, 0, 2]


@pytest.mark.parametrize(
    ("mtpot_s", "tpot_s", "lends"),
    [
        (1.5, 0.02, True),  # 900 tokens at 10 ms of 20: still in time after a pause of 1.5 s
        (0.4, 0.02, False),  # the gap would be too long
        (1.5, 0.0103, False),  # 0.3 ms a token leave 0.27 s of slack in all
    ],
)
def test_promise_lends_slot_if_sla_allows_pause(mtpot_s: float, tpot_s: float, lends: bool) -> None:
    """A short request waits. One running request can keep its SLA, the other has already missed its
    pace."""
    snapshot = board(
        [5, 900, 900], 1, output=[0, 10, 10], first_s=[np.inf, NOW - 0.1, NOW - 100.0],
        tpot_s=[tpot_s] * 3, ttft_s=[5.0] * 3, mtpot_s=[mtpot_s] * 3,
    )  # fmt: skip
    found = ranked(snapshot, lend_s=0.5)
    by_row = dict(zip(found.rows.tolist(), found.queue_key.tolist(), strict=True))
    assert (by_row[0] < by_row[1]) == lends
    assert max(by_row[0], by_row[1]) < by_row[2]


def test_promise_returns_lent_slot_before_gap_is_late() -> None:
    """The request stopped a second ago with an MTPOT of 1.5 s. With 0.5 s left it waits behind the
    shorter one; it returns when 0.25 s are left."""

    def paused(now: float) -> Snapshot:
        return board(
            [10, 300], 2, output=[0, 100], held=[0, 110], home=[-1, 1],
            since_s=[NOW, now - 1], first_s=[np.inf, NOW - 3], mtpot_s=[1.5] * 2,
            arrival_s=[NOW, NOW - 4], ttft_s=[5.0] * 2, tpot_s=[0.1] * 2,
        )  # fmt: skip

    waits = ranked(paused(NOW), pressed_share=0.0, return_s=0.25)
    assert line(waits) == [0, 1]
    assert waits.next_s == pytest.approx(NOW + 0.25)
    assert line(ranked(paused(NOW - 0.26), pressed_share=0.0, return_s=0.25)) == [1, 0]


def test_promise_ranks_request_whose_gap_is_due_first() -> None:
    """The request stopped a second ago: with an MTPOT of 1.05 s it is at risk, with 0.9 s
    its SLA is missed."""

    def paused(mtpot_s: float) -> Snapshot:
        return board(
            [10, 300], 2, output=[0, 100], held=[0, 110], home=[-1, 1],
            since_s=[NOW, NOW - 1], first_s=[np.inf, NOW - 3], mtpot_s=[mtpot_s] * 2,
            arrival_s=[NOW, NOW - 4], ttft_s=[5.0] * 2, tpot_s=[0.1] * 2,
        )  # fmt: skip

    # 10 tokens take 0.1 s, 0.05 s are left until the gap is late, and the other request has enough
    # slack.
    assert line(ranked(paused(1.05))) == [1, 0]
    assert line(ranked(paused(0.9))) == [0, 1]


def test_promise_requests_round_when_request_comes_to_be_at_risk() -> None:
    snapshot = board([10, 10], 2, arrival_s=[NOW, NOW - 2], ttft_s=[5.0, 5.0])
    found = ranked(snapshot)
    # one step, and pressed_s of 1 s before
    assert found.next_s == pytest.approx(NOW + 3.0 - 0.01 - 1.0)


def test_promise_ageing_moves_request_to_front() -> None:
    snapshot = board([5, 900], 2, since_s=[NOW, NOW - 61], arrival_s=[NOW, NOW - 61])
    assert line(ranked(snapshot, ageing_s=60.0)) == [1, 0]
    assert line(ranked(snapshot, ageing_s=62.0)) == [0, 1]


# Tenants


def over(tokens: Mapping[int, Sequence[tuple[int, int]]], room: int, **weights: float) -> list[int]:
    """Return the rows over their share; `tokens` maps each tenant to (prompt, expected) per waiting
    request."""
    rows = [(name, *each) for name, some in tokens.items() for each in some]
    tenant, prompt, total = np.array(rows).reshape(-1, 3).T
    weight = [weights.get(f"t{name}", 1.0) for name in tenant]
    made = jobs(len(rows), tenant=tenant, prompt=prompt, total=total.astype(float), weight=weight)
    every = np.arange(len(rows))
    snapshot = Snapshot(0.0, made, every, np.arange(0), (node(1, room),), table(certain(9)))
    return np.flatnonzero(is_over_share(snapshot, every, len(rows), every.astype(float))).tolist()


def test_tenant_share_is_proportional_to_weight() -> None:
    """Each of two tenants has a share of 50 of 100 tokens: two of four requests of the first
    fit."""
    assert over({1: [(10, 10)] * 4, 2: [(10, 10)]}, 100) == [2, 3]
    # With three times the weight the share is 75: three fit.
    assert over({1: [(10, 10)] * 4, 2: [(10, 10)]}, 100, t1=3.0) == [3]


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
    total_weight = sum({0: 1.0, 1: 2.0, 2: 0.5}[name] for name in present)
    need = made.prompt + made.total
    beyond: dict[int, bool] = {}
    for name in present:
        used = sum(need[r] for r in rows[split:].tolist() if tenant[r] == name)
        mine = sorted((i for i in range(split) if tenant[rows[i]] == name), key=lambda i: key[i])
        for i in mine:
            used += need[rows[i]]
            beyond[i] = used > {0: 1.0, 1: 2.0, 2: 0.5}[name] / total_weight * room
    for i, is_beyond in beyond.items():
        others = any(not b for j, b in beyond.items() if tenant[rows[j]] != tenant[rows[i]])
        assert found[i] == (is_beyond and others)


def test_promise_ranks_request_over_share_behind_missed_sla() -> None:
    """The requests of tenant 1 are shorter, but the first of them already fills half of the
    memory."""
    snapshot = board(
        [4_000, 4_001, 4_500], 3, tenant=[1, 1, 2], ttft_s=[5.0] * 3,
        arrival_s=[NOW, NOW, NOW - 6],
    )  # fmt: skip
    found = ranked(snapshot)
    assert line(found) == [0, 2, 1]
    assert found.key[1] > 3 * CLASS
