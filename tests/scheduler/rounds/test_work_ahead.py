"""The remaining time ahead of positions in a ranking, with and without cells of keys."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.policies.memory import PolicyMemory
from services.policies.order.ranking import Ranking
from services.scheduler.core.feasibility import CELLS, work_ahead_s

LARGE, SMALL = 3 * CELLS, 40


@given(
    seed=st.integers(0, 2**32),
    count=st.sampled_from([SMALL, LARGE]),
    spread=st.sampled_from([0.0, 1e-9, 3.0, 1e7]),
    steps=st.sampled_from([2, 50, 10**9]),
)
def test_work_ahead_is_the_weighted_sum_of_smaller_keys(
    seed: int, count: int, spread: float, steps: int
) -> None:
    rng = np.random.default_rng(seed)
    key = -spread / 2 + spread * rng.integers(0, steps, count) / steps
    remaining_s = rng.integers(1, 9, count).astype(float)  # sums are exact
    share = rng.choice([0.0, 0.5, 1.0], count)
    nothing = np.zeros(count)
    ranking = Ranking(
        np.arange(count), count, key, key, remaining_s, nothing, np.inf, PolicyMemory()
    )
    at = rng.permutation(count)[: int(rng.integers(1, 30))]
    key[at[:2]] = rng.choice([key[at[0]], -np.inf, np.inf], len(at[:2]))
    expected = [float(np.sum((remaining_s * share)[key < key[each]])) for each in at]
    assert work_ahead_s(ranking, at, share).tolist() == expected
