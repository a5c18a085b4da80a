"""The estimator benchmark predicts and measures the same prompts and tokens."""

import pytest

from benchmarks.estimator import Slice, SlicedEngine
from services.costs import CostModel

COST = CostModel(0.01, 0.0002, 0.001, 0.00001)


def test_slice_prediction_matches_worked_example() -> None:
    """Prompts of 10 and 30, and a context of 50 in KV, 4 steps. Prefill: 0.01 + 40·0.00021 =
    0.0184. Each step costs 0.01 + 3·0.001 = 0.013, and they read 4·90 + 3·(1+2+3+4) = 390."""
    mixed = Slice((10, 30), (50,), 4)
    assert (mixed.seqs, mixed.length) == (3, 30)
    expected = 0.0184 + 4 * 0.013 + 390 * 0.00001
    assert mixed.predicted_s(COST, "linear") == pytest.approx(expected)
    assert mixed.predicted_s(COST, "knn") == pytest.approx(expected)
    assert mixed.timing(COST, 2.0).elapsed_s == pytest.approx(2.0 + 50 * 0.00021)


@pytest.mark.slow
def test_engine_serves_the_drawn_slices() -> None:
    """The prefill generates a prompt's first token; requests that stayed need a step per token."""
    engine = SlicedEngine("models/demo", seed=3)
    stayed = 0
    for _ in range(4):
        drawn = engine.draw()
        timings = engine.serve()
        assert sum(t.prefill_tokens for t in timings) == sum(drawn.prompts)
        decoded = len(drawn.prompts) * (drawn.steps - 1) + len(drawn.stayed) * drawn.steps
        assert sum(t.decode_seqs for t in timings) == decoded
        stayed += len(drawn.stayed)
    assert stayed > 0
