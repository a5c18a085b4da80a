"""Policy memory and the columns of a snapshot, against dictionaries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.decide import first_in_order
from services.policies.memory import MemoryColumns, PolicyMemory
from services.policies.snapshot import SelectedColumns
from tests.policies.made_snapshots import jobs

ROWS = 12
# Rows with the serials of the requests that use them by then, and whether others are forgotten.
Write = tuple[dict[int, int], str, bool]
WRITES = st.lists(
    st.tuples(
        st.dictionaries(st.integers(0, ROWS - 1), st.integers(0, 3), min_size=1),
        st.sampled_from("ab"),
        st.booleans(),
    ),
    max_size=6,
)


@given(WRITES)
def test_memory_recalls_what_was_last_written_about_a_request(writes: list[Write]) -> None:
    """A request is a row and a serial. A write keeps its other columns, and those of others in
    other rows; `with_columns` forgets all others."""
    known: dict[tuple[int, int], dict[str, float]] = {}
    memory = PolicyMemory()
    for number, (requests, column, forgets) in enumerate(writes, 1):
        rows = np.array(list(requests))
        serials = np.array([row + ROWS * use for row, use in requests.items()])
        values = rows + 100.0 * number
        if forgets:
            memory = memory.with_columns(rows, serials, **{column: values})
            memory = PolicyMemory({}, MemoryColumns(), memory.ranks)
        else:
            memory = memory.with_notes(rows, serials, {column: values})
        before, known = (
            known,
            {} if forgets else {k: v for k, v in known.items() if k[0] not in requests},
        )
        for row, serial, value in zip(rows, serials, values, strict=True):
            kept = {} if forgets else before.get((row, serial), {})
            known[row, serial] = kept | {column: value}
        asked = [(row, row + ROWS * use) for row in range(ROWS + 2) for use in range(4)]
        found = memory.notes.recall(("a", "b"), *np.array(asked).T)
        for name, recalled in zip("ab", found, strict=True):
            assert recalled.tolist() == [known.get(key, {}).get(name, 0.0) for key in asked]


@given(
    st.integers(1, 400), st.integers(1, 40), st.sampled_from([1, 2, 5, 1_000]),
    st.booleans(), st.integers(0, 2**32),
)  # fmt: skip
def test_first_in_order_matches_sorting(
    count: int, most: int, values: int, skewed: bool, seed: int
) -> None:
    """With keys that are all equal, nearly all equal, or distinct."""
    rng = np.random.default_rng(seed)
    key = rng.integers(0, values, count) * (rng.random(count) < (0.05 if skewed else 1.0))
    serial, at = rng.permutation(count), np.sort(rng.choice(1_000, count, replace=False))
    found = first_in_order(at, key.astype(float), serial, most)
    assert set(found.tolist()) == set(at[np.lexsort((serial, key))][:most].tolist())
    assert len(found) == min(most, count)


def test_selected_columns_are_gathered_once_and_read_only() -> None:
    board = jobs(4, prompt=[10, 20, 30, 40], output=[1, 2, 3, 4], held=[0, 22, 10, 0])
    selected = SelectedColumns(board, np.array([3, 1, 2]))
    assert selected.prompt.tolist() == [40, 20, 30] and selected.prompt is selected.prompt
    assert selected.context.tolist() == [44, 22, 33]
    assert selected.missing.tolist() == [44.0, 0.0, 23.0]
    with pytest.raises(ValueError, match="read-only"):
        selected.output[0] = 5
