"""Waiting requests with KV that become candidates: for all workers together, and for each alone."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecasttable import ForecastTable
from services.policies.decide import _head, _resting_heads
from services.policies.snapshot import Snapshot
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, ranking


@settings(max_examples=examples(100))
@given(st.integers(1, 6), st.integers(1, 120), st.integers(1, 50), st.integers(0, 2**32))
def test_resting_heads_equal_those_of_each_worker(
    fleet: int, count: int, keys: int, seed: int
) -> None:
    """Some requests have their KV at a worker that is not in the round."""
    rng = np.random.default_rng(seed)
    workers = tuple(
        node(number, int(rng.integers(10, 900)), int(rng.integers(0, 9)))
        for number in range(1, fleet + 1)
    )
    made = jobs(
        count, home=rng.integers(1, fleet + 2, count), held=np.ones(count),
        prompt=rng.integers(1, 90, count), serial=rng.permutation(count) + 1,
    )  # fmt: skip
    snapshot = Snapshot(0.0, made, np.arange(count), np.arange(0), workers, ForecastTable())
    ranked = ranking(snapshot, rng.integers(0, keys, count).astype(float))
    at = np.flatnonzero(rng.random(count) < 0.8)
    if not len(at):
        return
    expected: set[int] = set()
    for worker in workers:
        here = at[made.home[at] == worker.number]
        expected |= set(_head(snapshot, ranked, here, (worker,)).tolist())
    found = _resting_heads(snapshot, ranked, at)
    assert len(found) == len(expected) and set(found.tolist()) == expected
