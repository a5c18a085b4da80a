"""Cutting the pool into batches: by fixed size, by serving time and by wasted memory access."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.costs import CostModel
from services.policies.form.batch_cuts import CUTS
from services.policies.form.pool import Batches, Room, Sizes
from services.policies.form.wma import saved_access, wma
from services.policies.parameters import resolve

Row = tuple[int, int]  # prefilled tokens and permitted output tokens
COST = CostModel(base_s=0.01, prefill_token_s=1e-4, decode_seq_s=1e-3, context_token_s=1e-5)
rows_of = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=30)


def sizes(rows: Sequence[Row]) -> Sizes:
    length, max_output = np.array(rows, np.int64).reshape(-1, 2).T
    return Sizes(length, max_output, max_output)


def cut(
    form: str,
    rows: Sequence[Row],
    tokens: int = 1_000,
    slots: int = 99,
    block_tokens: int = 1,
    cost: CostModel = COST,
    known: Sequence[Sequence[int]] = (),
    **params: float,
) -> list[list[int]]:
    """Return the batches after the cut as lists of rows; `known` batches contain their rows
    already."""
    made, waits = sizes(rows), [n for n in range(len(rows)) if not any(n in b for b in known)]
    at = np.array([row for batch in known for row in batch], np.int64)
    ids = np.array([nth for nth, batch in enumerate(known) for _ in batch], np.int64)
    room = Room(tokens, slots, block_tokens, cost)
    given_params = resolve(form, CUTS[form].params, params)
    labels = CUTS[form].cut(
        made, np.array(waits, np.int64), Batches.group(at, ids, made), room, given_params
    )
    batches = [list(batch) for batch in known]
    batches += [[] for _ in range(int(labels.max(initial=-1)) + 1 - len(known))]
    for row, label in zip(waits, labels.tolist(), strict=True):
        batches[label].append(row)
    return batches


def padded(rows: Sequence[Row], batch: Sequence[int], block: int = 1) -> int:
    """KV tokens of a batch padded to its longest member, in whole blocks."""
    each = max(rows[n][0] for n in batch) + max(rows[n][1] for n in batch)
    return len(batch) * -(-each // block) * block


# Fixed size


def test_fixed_cut_matches_worked_example() -> None:
    six = [(10, 10)] * 6
    assert cut("fixed", six, slots=4) == [[0, 1, 2, 3], [4, 5]]
    assert cut("fixed", six, 50, slots=4) == [[0, 1], [2, 3], [4, 5]]
    # 20 tokens need two blocks of 16, so 64 tokens hold two requests of 32
    assert cut("fixed", six, 64, slots=4, block_tokens=16) == [[0, 1], [2, 3], [4, 5]]
    assert cut("fixed", [(10, 10), (90, 9), (10, 10)], 100) == [[0], [1], [2]]
    # each is padded to 10 + 90; unpadded they would need 20 + 91
    assert cut("fixed", [(10, 10), (1, 90)], 199) == [[0], [1]]
    assert cut("fixed", [(10, 10), (1, 90)], 200) == [[0, 1]]
    assert cut("fixed", []) == []


@given(rows_of, st.integers(80, 300), st.integers(1, 6), st.sampled_from([1, 16]))
def test_fixed_cut_is_ordered_maximal_and_fits_memory(
    rows: list[Row], tokens: int, slots: int, block: int
) -> None:
    batches = cut("fixed", rows, tokens, slots, block)
    assert [row for batch in batches for row in batch] == list(range(len(rows)))
    for batch, after in pairwise([*batches, []]):
        assert len(batch) <= slots
        assert len(batch) == 1 or padded(rows, batch, block) <= tokens
        if after and len(batch) < slots:
            assert padded(rows, [*batch, after[0]], block) > tokens


# By serving time


def test_dp_cut_matches_paper_example() -> None:
    """Fig. 11: 15 requests of 10 tokens and one of 1,024, in slices of 128. Together all are padded
    to 1,024; two batches take less time. With these costs (seconds; N·L tokens are read per
    step):

      together 16·1024·1.1e-4 + 0.01 + 128·(0.01 + 0.016) + 1e-5·16·(128·1024 + 128·129/2)  = 27.4
      apart    15·10·1.1e-4   + 0.01 + 128·(0.01 + 0.015) + 1e-5·15·(128·10 + 128·129/2)    = 4.7
             + 1024·1.1e-4    + 0.01 + 128·(0.01 + 0.001) + 1e-5·(128·1024 + 128·129/2)     = 2.9
    """
    rows = [(10, 128)] * 15 + [(1_024, 128)]
    batches = cut("dp", rows, 100_000)
    assert sorted(map(sorted, batches)) == [list(range(15)), [15]]
    assert COST.serve_s(16, 1_024, 128) == pytest.approx(
        16 * 1_024 * 1.1e-4 + 0.01 + 128 * 0.026 + 1e-5 * 16 * (128 * 1_024 + 8_256)
    )
    together = COST.serve_s(16, 1_024, 128)
    apart = COST.serve_s(15, 10, 128) + COST.serve_s(1, 1_024, 128)
    assert (round(together, 1), round(apart, 1)) == (27.4, 7.6)


def test_dp_cut_of_three_lengths_matches_worked_example() -> None:
    """T(N, L) = 1 + 0.1·N·L for one step without further cost. {1, 2, 9} takes 1 + 2.7 = 3.7; {1,
    2} and {9} take 1.4 + 1.9 = 3.3; {1} and {2, 9} take 1.1 + 2.8 = 3.9; three batches take 1.1
    + 1.2 + 1.9 = 4.2. With 20 tokens of memory, (9 + 1)·3 do not fit."""
    steps = CostModel(base_s=0.5, prefill_token_s=0.1, decode_seq_s=0.0, context_token_s=0.0)
    rows = [(9, 1), (1, 1), (2, 1)]
    assert cut("dp", rows, cost=steps) == [[1, 2], [0]]
    dear = CostModel(base_s=5.0, prefill_token_s=0.1, decode_seq_s=0.0, context_token_s=0.0)
    assert cut("dp", rows, cost=dear) == [[0, 1, 2]]  # 10 + 2.7 < 10 + 0.4 + 10 + 0.9
    assert cut("dp", rows, 20, cost=dear) == [[1, 2], [0]]  # 10.9 + 10.4 < 11.8 + 10.1


def contiguous(count: int) -> Iterator[list[range]]:
    """Return all partitions of a sequence of this length into contiguous ranges."""
    if not count:
        yield []
    for last in range(1, count + 1):
        for before in contiguous(count - last):
            yield [*before, range(count - last, count)]


def partitions(rows: list[int]) -> Iterator[list[list[int]]]:
    if not rows:
        yield []
        return
    for rest in partitions(rows[1:]):
        yield [[rows[0]], *rest]
        for nth in range(len(rest)):
            yield [*rest[:nth], [rows[0], *rest[nth]], *rest[nth + 1 :]]


def serves_s(lengths: Sequence[int], batches: Sequence[Sequence[int]], steps: int) -> float:
    return sum(COST.serve_s(len(b), max(lengths[n] for n in b), steps) for b in batches if len(b))


def fits(lengths: Sequence[int], batch: Sequence[int], steps: int, tokens: int) -> bool:
    return len(batch) == 1 or len(batch) * (max(lengths[n] for n in batch) + steps) <= tokens


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=10), st.integers(1, 128),
    st.integers(500, 8_000), st.integers(1, 10),
)  # fmt: skip
def test_dp_cut_is_optimal_over_contiguous_cuts(
    lengths: list[int], steps: int, tokens: int, slots: int
) -> None:
    """Compare with all 2^(n−1) contiguous cuts, n ≤ 10."""
    batches = cut("dp", [(length, steps) for length in lengths], tokens, slots)
    ascending = sorted(lengths)
    assert sorted(n for batch in batches for n in batch) == list(range(len(lengths)))
    assert all(len(b) <= slots and fits(lengths, b, steps, tokens) for b in batches)
    least = min(
        serves_s(ascending, way, steps)
        for way in contiguous(len(lengths))
        if all(len(b) <= slots and fits(ascending, b, steps, tokens) for b in way)
    )
    assert serves_s(lengths, batches, steps) == pytest.approx(least)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 900), min_size=1, max_size=6), st.integers(1, 128),
    st.integers(500, 8_000),
)  # fmt: skip
def test_dp_cut_is_optimal_over_all_partitions(lengths: list[int], steps: int, tokens: int) -> None:
    """Compare with all set partitions, n ≤ 6. Batches of adjacent lengths are among the best, as
    the paper assumes, because time and memory of a batch grow with its longest member."""
    batches = cut("dp", [(length, steps) for length in lengths], tokens)
    least = min(
        serves_s(lengths, way, steps)
        for way in partitions(list(range(len(lengths))))
        if all(fits(lengths, b, steps, tokens) for b in way)
    )
    assert serves_s(lengths, batches, steps) == pytest.approx(least)


# By wasted memory access


def wasted(batch: Sequence[Row]) -> int:
    """Simulate step by step (Magnus, Fig. 9). Until a request ends, every iteration reads its
    pad tokens; from its last token on, it reads the padded request and all generated tokens."""
    longest, steps = max(length for length, _ in batch), max(made for _, made in batch)
    worst = 0
    for length, made in batch:
        reads = 0
        for step in range(1, steps + 1):
            if step <= made:
                reads += longest - length
            if step >= made:
                reads += step + longest
        worst = max(worst, reads)
    return worst


def test_wma_matches_worked_example() -> None:
    """Requests of L = 10, G = 3 and L = 4, G = 2; L(B) = 10, G(B) = 3.

    first   gen 3·(10 − 10) = 0;  wait g = 3: 3 + 10 = 13                     → 13
    second  gen 2·(10 − 4) = 12;  wait g = 2, 3: (2 + 10) + (3 + 10) = 25     → 37
    """
    rows = [(10, 3), (4, 2)]
    made = sizes(rows)
    alone = wma(made.length, made.max_output, saved_access(made.length, made.max_output))
    assert alone.tolist() == [13, 6]  # g = 2: 2 + 4
    least = saved_access(made.length, made.max_output).min(keepdims=True)
    assert wma(np.array([10]), np.array([3]), least).tolist() == [37]
    assert wasted(rows) == 37


@given(st.lists(st.tuples(st.integers(1, 80), st.integers(1, 80)), min_size=1, max_size=8))
def test_wma_matches_simulation(batch: list[Row]) -> None:
    made = sizes(batch)
    least = saved_access(made.length, made.max_output).min(keepdims=True)
    found = wma(made.length.max(keepdims=True), made.max_output.max(keepdims=True), least)
    assert found.tolist() == [wasted(batch)]


def literal_insert(
    rows: Sequence[Row], known: list[list[int]], tokens: int, most: float, slots: int
) -> list[list[int]]:
    """Algorithm 1, line by line."""
    queue = [list(batch) for batch in known]
    for row in range(len(rows)):
        if any(row in batch for batch in known):
            continue
        least, into = float("inf"), None
        for batch in queue:
            joined = [*batch, row]
            fit = padded(rows, joined) <= tokens and len(joined) <= slots
            reads = wasted([rows[n] for n in joined])
            if fit and reads < least:
                least, into = reads, batch
        if into is not None and least < most:
            into.append(row)
        else:
            queue.append([row])
    return queue


@settings(max_examples=150)
@given(
    rows_of, st.integers(100, 2_000), st.sampled_from([0, 300, 2_000, 50_000]), st.integers(1, 9),
    st.integers(0, 4),
)  # fmt: skip
def test_wma_cut_matches_reference_implementation(
    rows: list[Row], tokens: int, most: int, slots: int, there: int
) -> None:
    """Existing batches have one member each and may already exceed the limits."""
    known = [[n] for n in range(min(there, len(rows)))]
    found = cut("wma", rows, tokens, slots, known=known, wma_max=most)
    assert found == literal_insert(rows, known, tokens, most, slots)


def test_wma_cut_transcript() -> None:
    """Φ = 2,000. Requests (L, G) in arrival order:

      (10, 10) starts batch A.
      (100, 40) with A pads 10·90 and waits Σ_{g=10}^{40} (g + 100): 900 + 3,875. It starts batch B.
      (12, 9) with A wastes Σ_{g=9}^{10} (g + 12) = 43, and (10, 10) 10·2 + 22 = 42. It joins A.
      (90, 38) with B wastes 38·10 + Σ_{g=38}^{40} (g + 100) = 380 + 417 = 797. It joins B.

    With Θ = 60 tokens A is full: 3·(12 + 10) = 66.
    """
    rows = [(10, 10), (100, 40), (12, 9), (90, 38), (10, 10)]
    assert cut("wma", rows[:4], wma_max=2_000) == [[0, 2], [1, 3]]
    assert wasted([rows[0], rows[1]]) == 900 + 3_875
    assert (wasted([rows[0], rows[2]]), wasted([rows[1], rows[3]])) == (43, 797)
    assert cut("wma", rows, wma_max=2_000) == [[0, 2, 4], [1, 3]]
    assert cut("wma", rows, 60, wma_max=2_000) == [[0, 2], [1], [3], [4]]
