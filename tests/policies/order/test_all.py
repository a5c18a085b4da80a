"""Properties of every order."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import Floats
from services.policies.memory import PolicyMemory
from services.policies.order.ranking import Ranking
from services.policies.order.registry import ORDERS, Order
from services.policies.snapshot import Snapshot
from tests.examples import examples
from tests.policies.made_snapshots import snapshots

ALL = sorted(ORDERS)


def with_budgets(snapshot: Snapshot, seed: int) -> Snapshot:
    """Give random rows budgets, some of them already exceeded."""
    rng = np.random.default_rng(seed)
    old = snapshot.jobs
    count = len(old)

    def some(*values: float) -> Floats:
        return rng.choice([np.inf, *values], count)

    first_s = np.where(old.output > 0, 100.0 - rng.uniform(0, 20, count), np.inf)
    budgeted = replace(
        old,
        first_s=first_s,
        deadline_s=some(90.0, 101.0, 500.0),
        ttft_s=some(0.5, 30.0, 200.0),
        tpot_s=some(0.01, 2.0),
    )
    return replace(snapshot, jobs=budgeted)


def later(snapshot: Snapshot, seed: int) -> Snapshot:
    """Return a successor: outputs grow, KV comes and goes, and some rows have new requests."""
    rng = np.random.default_rng(seed)
    old = snapshot.jobs
    count = len(old)
    anew = rng.random(count) < 0.3
    output = np.minimum(old.cap, old.output + rng.integers(0, 20, count))
    return replace(
        snapshot,
        now=snapshot.now + float(rng.choice([0.0, 0.5, 15.0, 70.0])),
        jobs=replace(
            old,
            serial=np.where(anew, 1_000 + rng.permutation(count), old.serial),
            output=output,
            held=np.where(rng.random(count) < 0.5, old.held, old.prompt + output),
            total=snapshot.forecasts.mean(old.forecast, output, old.cap),
            since_s=np.where(anew, snapshot.now, old.since_s),
        ),
    )


def ranked(order: Order, snapshot: Snapshot, memory: PolicyMemory) -> Ranking:
    params = {name: param.default for name, param in order.params.items()}
    return order.rank(snapshot, params, memory)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(60))
@given(snapshot=snapshots(), seeds=st.lists(st.integers(0, 2**32), min_size=1, max_size=4))
def test_order_is_deterministic_and_complete(
    name: str, snapshot: Snapshot, seeds: list[int]
) -> None:
    order, memory = ORDERS[name], PolicyMemory()
    for seed in seeds:
        snapshot = with_budgets(snapshot, seed)
        found, again = ranked(order, snapshot, memory), ranked(order, snapshot, memory)
        rows = [*snapshot.queued.tolist(), *snapshot.running.tolist()]
        assert (found.rows.tolist(), found.split) == (rows, len(snapshot.queued))
        for column in ("key", "queue_key", "remaining_s", "lift_s"):
            values = getattr(found, column)
            assert values.tolist() == getattr(again, column).tolist()
            assert len(values) == len(rows)
            assert not np.isnan(values).any()
        assert np.isfinite(found.key).all()
        assert (found.remaining_s >= 0).all()
        assert (found.lift_s >= 0).all()
        assert found.next_s > snapshot.now
        waits, runs = slice(found.split), slice(found.split, None)
        assert found.queue_key[waits].tolist() == found.key[waits].tolist()
        assert (found.queue_key[runs] <= found.key[runs]).all()
        if not order.preempts:
            assert (found.queue_key[runs] == -np.inf).all()
        memory, snapshot = found.memory, later(snapshot, seed)


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=examples(30))
@given(snapshot=snapshots(), seed=st.integers(0, 2**32))
def test_order_forgets_removed_requests(name: str, snapshot: Snapshot, seed: int) -> None:
    """Half of the rows are freed; the memory then names only the remaining requests."""
    order = ORDERS[name]
    memory = ranked(order, snapshot, PolicyMemory()).memory
    stay = np.random.default_rng(seed).random(len(snapshot.jobs)) < 0.5
    fewer = replace(
        snapshot,
        queued=snapshot.queued[stay[snapshot.queued]],
        running=snapshot.running[stay[snapshot.running]],
    )
    memory = ranked(order, fewer, memory).memory
    left = set(memory.ranks.serials.tolist()) - {-1}
    here = np.concatenate([fewer.queued, fewer.running])
    assert left in (set(), set(fewer.jobs.serial[here].tolist()))


def test_only_hrrn_has_batch_key() -> None:
    """Only HRRN has a batch key: (8 + 2) / 2 = 5 before (8 + 4) / 4 = 3."""
    assert [name for name in ALL if ORDERS[name].batch_key] == ["hrrn"]
    batch_key = ORDERS["hrrn"].batch_key
    assert batch_key is not None
    assert batch_key(np.array([8.0, 8.0]), np.array([2.0, 4.0])).tolist() == [-5, -3]
