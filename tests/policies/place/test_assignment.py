"""Assignment of requests one by one, against its definition."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from services.policies.place.assignment import Assignment, assign
from services.policies.place.loads import Loads
from services.policies.snapshot import NOWHERE
from tests.examples import examples
from tests.policies.made_snapshots import candidates, jobs, node


@settings(max_examples=examples(150))
@given(
    st.integers(2, 12), st.integers(0, 90), st.integers(0, 2**32), st.booleans(),
    st.sampled_from([0.1, 1e16]),
)  # fmt: skip
def test_each_request_goes_to_least_load_with_its_score(
    fleet: int, count: int, seed: int, alike: bool, there: float
) -> None:
    """The first worker of those with equal sums, which rounding makes frequent at large loads."""
    rng = np.random.default_rng(seed)
    workers = [node(i + 1, places=int(rng.integers(0, 9)), reach_tokens=200) for i in range(fleet)]
    asked = candidates(jobs(count), [False] * count, *workers)
    adds = rng.integers(1, 4, (count, 1 if alike else fleet)) * np.ones((count, fleet))
    held = there * rng.integers(0, 3, fleet).astype(np.float64)
    loads = Loads(held, lambda rows: (adds[rows], adds[rows]))
    free, sums, expected = [worker.max_running for worker in workers], loads.there.tolist(), []
    for row in range(count):
        able = [i for i in range(fleet) if free[i]]
        chosen = min(able, key=lambda i: sums[i] + adds[row, i], default=NOWHERE)
        expected.append(chosen if chosen == NOWHERE else workers[chosen].number)
        if able:
            free[chosen] -= 1
            sums[chosen] += adds[row, chosen]
    at = np.full(count, NOWHERE)
    assert assign(asked, at, lambda: loads, Assignment.least).tolist() == expected
