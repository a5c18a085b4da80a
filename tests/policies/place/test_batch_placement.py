"""Assignment of batches to workers: by turns, and the longest to the least loaded."""

from itertools import product

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from services.policies.arrange.batch_placement import UNASSIGNED, max_min, round_robin


def test_max_min_gives_longest_batch_to_least_loaded_worker() -> None:
    """Loads 5 and 0, batches of 3, 4 and 2 s: 4 → worker 2 (4), 3 → worker 2 (7), 2 → worker 1
    (7)."""
    same = np.array([[3.0, 4.0, 2.0]] * 2)
    able = np.ones((2, 3), bool)
    assert max_min(np.array([5.0, 0.0]), same, able, -1).tolist() == [1, 1, 0]
    # worker 2 cannot take the longest: 4 → worker 1 (9), then 3 and 2 → worker 2
    able[1, 1] = False
    assert max_min(np.array([5.0, 0.0]), same, able, -1).tolist() == [1, 0, 1]
    able[:, 0] = False
    assert max_min(np.array([5.0, 0.0]), same, able, -1).tolist() == [UNASSIGNED, 0, 1]


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4),
    st.lists(st.integers(1, 30), max_size=8), st.integers(0, 2**32),
)  # fmt: skip
def test_max_min_matches_its_definition(loads: list[int], takes: list[int], seed: int) -> None:
    """Each batch, longest first, goes to the least loaded worker that can take it."""
    able = np.random.default_rng(seed).random((len(loads), len(takes))) < 0.8
    found = max_min(np.array(loads, float), np.array([takes] * len(loads), float), able, 0)
    now = list(loads)
    for batch in sorted(range(len(takes)), key=lambda b: (-takes[b] if able[:, b].any() else 0, b)):
        could = [w for w in range(len(loads)) if able[w, batch]]
        if could:
            assert now[found[batch]] == min(now[w] for w in could) and found[batch] in could
            now[found[batch]] += takes[batch]
        else:
            assert found[batch] == UNASSIGNED


def test_max_min_is_within_four_thirds_of_optimum() -> None:
    """Graham's bound for longest-first (1969), checked against every assignment."""
    rng = np.random.default_rng(3)
    for _ in range(30):
        takes = rng.integers(1, 40, 6)
        chosen = max_min(np.zeros(3), np.array([takes] * 3, float), np.ones((3, 6), bool), -1)
        spans = [
            max(
                sum(t for t, w in zip(takes, way, strict=True) if w == worker)
                for worker in (0, 1, 2)
            )
            for way in product((0, 1, 2), repeat=6)
        ]
        made = max(int(takes[chosen == worker].sum()) for worker in (0, 1, 2))
        assert made <= min(spans) * 4 / 3


def test_round_robin_continues_after_last_worker() -> None:
    able = np.ones((3, 4), bool)
    nothing = np.zeros(3), np.zeros((3, 4))
    assert round_robin(*nothing, able, -1).tolist() == [0, 1, 2, 0]
    assert round_robin(*nothing, able, 0).tolist() == [1, 2, 0, 1]
    able[2] = False
    assert round_robin(*nothing, able, 0).tolist() == [1, 0, 1, 0]


@given(st.integers(1, 4), st.integers(0, 12), st.integers(-1, 3), st.integers(0, 2**32))
def test_round_robin_matches_its_definition(
    workers: int, batches: int, last: int, seed: int
) -> None:
    """Each batch goes to the next worker in turn that can serve it."""
    able = np.random.default_rng(seed).random((workers, batches)) < 0.8
    last = min(last, workers - 1)
    found = round_robin(np.zeros(workers), np.zeros((workers, batches)), able, last).tolist()
    for batch, worker in enumerate(found):
        turns = [(last + 1 + step) % workers for step in range(workers)]
        expected = next((each for each in turns if able[each, batch]), UNASSIGNED)
        assert worker == expected
        last = last if worker == UNASSIGNED else worker
