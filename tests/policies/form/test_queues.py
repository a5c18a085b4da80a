"""The demands of several queues, computed together, equal those of each queue alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.forecast import from_lengths
from services.policies.cadence import INTERVAL_S
from services.policies.form.curve import CurveDemand
from services.policies.form.demand import WorkerQueues
from services.policies.form.registry import FORMS
from services.policies.parameters import resolve
from tests.examples import examples
from tests.policies.made_snapshots import jobs, node, table


@pytest.mark.parametrize("interval_s", [0.0, 0.3])
@settings(max_examples=examples(100))
@given(st.lists(st.integers(1, 80), min_size=1, max_size=6), st.integers(0, 2**32))
def test_curves_of_several_queues_equal_those_of_each(
    interval_s: float, sizes: list[int], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    count = sum(sizes)
    forecasts = table(*(from_lengths(rng.integers(1, 300, 12).tolist(), 400, "h") for _ in "abc"))
    cap, output = rng.integers(1, 400, count), rng.integers(0, 350, count)
    made = jobs(
        count, prompt=rng.integers(1, 200, count), output=output, cap=np.maximum(cap, output + 1),
        blocks=rng.integers(0, 20, count), forecast=rng.integers(0, 3, count),
    )  # fmt: skip
    limits = np.minimum(made.cap, output + rng.integers(1, 100, count))
    workers = tuple(
        node(number, int(rng.integers(500, 9_000)), block_tokens=int(rng.choice([1, 16])))
        for number in range(1, len(sizes) + 1)
    )
    runs, numbers = rng.random(count) < 0.5, {INTERVAL_S: interval_s}
    jobs_of_all = made.select(np.arange(count))
    in_reach, tables = rng.random(count) < rng.choice([0.5, 1.0]), (forecasts, numbers)
    queues = WorkerQueues(jobs_of_all, runs, limits, workers, np.array(sizes), *tables, in_reach)
    params = resolve("curve", FORMS["curve"].params, {})
    together = FORMS["curve"].demands(queues, params, rng)
    parts = np.split(in_reach, np.cumsum(sizes)[:-1])
    for found, queue, kept in zip(together, queues, parts, strict=True):
        alone = FORMS["curve"].demand(queue, params, rng)
        assert isinstance(found, CurveDemand) and isinstance(alone, CurveDemand)
        assert np.array_equal(found.held, alone.held)
        assert np.array_equal(found.moments, alone.moments[:, :, kept])
        assert found.columns[kept].tolist() == list(range(np.count_nonzero(kept)))
        assert (found.limit, found.z) == (alone.limit, alone.z)
