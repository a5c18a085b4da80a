"""What is learnt from finished batches, when, and how far off the estimator says it was."""

from math import inf, nan

import numpy as np
import pytest

from services.costs import BatchTiming, CostModel, Direction, Neighbours, StepTiming, SwapTiming
from services.estimator.batches import Batches, Learning
from services.estimator.errors import Errors
from services.estimator.state import EstimatorState
from services.policies.estimate import ESTIMATES

COST = CostModel(0.1, 0.001, 0.01, 0.0)
KINDS = [(16, 0), (64, 0), (256, 0), (0, 1), (0, 4)] * 4
STEPS = [
    StepTiming(p, d, p + d * held, COST.step_s(p, d, p + d * held))
    for p, d in KINDS
    for held in (9, 50)
]


def batch(seconds: float, seqs: int = 4, length: int = 100, generated: int = 50) -> BatchTiming:
    return BatchTiming(seqs, length, generated, seconds)


def told(batches: Batches, now: float) -> bool:
    return batches.refresh(COST, now)


def test_magnus_rule_by_hand() -> None:
    """4 sequences of 100 for 50 tokens: 0.1 + 400·0.001 + 50·(0.1 + 4·0.01) = 7.5 s. Off by more
    than 2 s and more than 20 %: 9.4 s is 1.9 s off, 9.6 s is 2.1 s (21.9 %) off; 5.4 s is 2.1 s
    (38.9 %) off."""
    assert COST.serve_s(4, 100, 50) == pytest.approx(7.5)
    batches = Batches(Learning())
    for seconds in (9.4, 9.6, 5.4):
        assert batches.add(batch(seconds), 0.0)
    assert told(batches, 120.0)
    assert batches.neighbours == Neighbours.of([batch(9.6), batch(5.4)])


def test_a_long_batch_must_be_off_by_a_fifth_too() -> None:
    """20 as long tokens: 0.5 + 1000·0.14 = 140.5 s, and 167 s is 26.5 s but only 15.9 % off."""
    batches = Batches(Learning())
    batches.add(batch(167.0, generated=1_000), 0.0)
    assert not told(batches, 120.0)
    assert not batches.neighbours


def test_refreshes_as_a_transcript() -> None:
    batches = Batches(Learning(refresh_s=120.0))
    assert not told(batches, 500.0), "nothing waits"
    batches.add(batch(20.0), 1_000.0)
    batches.add(batch(21.0), 1_100.0)
    assert not told(batches, 1_119.0)
    assert told(batches, 1_120.0)
    assert not told(batches, 1_121.0), "all were told"
    batches.add(batch(22.0), 1_125.0)
    assert not told(batches, 1_244.0)
    assert told(batches, 1_245.0)
    assert list(batches.neighbours.columns[3]) == [20.0, 21.0, 22.0]


def test_what_is_kept_is_bounded_and_the_oldest_goes() -> None:
    batches = Batches(Learning(neighbours=3))
    for seconds in range(20, 25):
        batches.add(batch(float(seconds)), 0.0)
    assert told(batches, 120.0)
    assert list(batches.neighbours.columns[3]) == [22.0, 23.0, 24.0]
    for seconds in range(Batches.WAITING + 5):
        batches.add(batch(100.0 + seconds), 200.0)
    assert told(batches, 400.0)
    assert len(batches.errors) == Errors.WINDOW


@pytest.mark.parametrize(
    "junk",
    [
        batch(0.0), batch(-1.0), batch(nan), batch(inf), batch(1.0, seqs=0), batch(1.0, length=0),
        batch(1.0, generated=0), batch(1.0, generated=2**31),
    ],
)  # fmt: skip
def test_nonsense_is_no_batch(junk: BatchTiming) -> None:
    batches = Batches(Learning())
    assert not batches.add(junk, 0.0)
    assert not told(batches, 1e9)


def learnt_state() -> EstimatorState:
    state = EstimatorState()
    state.observe("w", STEPS)
    return state


def test_a_worker_s_batches_change_what_knn_says_and_nothing_else() -> None:
    """Five of 20 s where the linear model says 7.5 s."""
    state = learnt_state()
    before = state.model("w")
    assert before is not None
    seen = state.observe("w", [], batches=[batch(20.0)] * 5 + [batch(nan)], now=10.0)
    assert (seen.version, seen.batches_kept, seen.taught, seen.renewed) == (1, 5, False, False)
    seen = state.observe("w", [], now=130.0)
    assert (seen.version, seen.taught, seen.refitted, seen.renewed) == (2, True, False, True)
    after = state.model("w")
    assert after is not None
    asked = [np.array([float(n)]) for n in (4, 100, 50)]
    assert ESTIMATES["linear"](after, *asked) == pytest.approx(ESTIMATES["linear"](before, *asked))
    assert ESTIMATES["linear"](after, *asked) == pytest.approx([7.5], rel=1e-3)
    assert ESTIMATES["knn"](after, *asked) == pytest.approx([20.0])


def test_neighbours_stay_through_refits_and_prices() -> None:
    state = learnt_state()
    state.observe("w", [], batches=[batch(20.0)], now=0.0)
    state.observe("w", [], now=120.0)
    assert state.observe("w", STEPS * 4).refitted
    assert state.observe("w", [], [SwapTiming(Direction.UPLOAD, 64, 1e-3)] * 3).repriced
    model = state.model("w")
    assert model is not None
    assert (model.version, len(model.neighbours)) == (4, 1)


def test_batches_wait_for_a_model_to_tell_them() -> None:
    state = EstimatorState()
    seen = state.observe("w", [], batches=[batch(20.0)], now=0.0)
    assert not state.observe("w", [], now=500.0).renewed
    seen = state.observe("w", STEPS, now=501.0)
    assert (seen.version, seen.taught) == (1, False)
    seen = state.observe("w", [], now=502.0)
    assert (seen.version, seen.taught) == (2, True)


def test_the_batches_error_is_that_of_the_model_which_had_not_learnt_them() -> None:
    """All are 15 s where 7.5 s is said, half of it; once learnt, nothing is missed."""
    state = learnt_state()
    assert state.batch_error("w") is None
    state.observe("w", [], batches=[batch(15.0)] * 40, now=0.0)
    state.observe("w", [], now=120.0)
    assert state.batch_error("w") == pytest.approx((0.5, 0.5), rel=1e-3)
    for round in range(1, 3):
        state.observe("w", [], batches=[batch(15.0)] * 300, now=200.0 * round)
        state.observe("w", [], now=200.0 * round + 120.0)
    assert state.batch_error("w") == pytest.approx((0.0, 0.0), abs=1e-9)
    assert state.batch_error("unknown") is None


def test_a_step_s_error_is_told_before_it_is_learnt_from() -> None:
    """The worker gets twice as slow: each step then takes twice what was said, half is missed.
    Only the fit's own error forgives it."""
    state = learnt_state()
    model = state.model("w")
    assert model is not None
    assert model.error_steps == 0, "none was told yet: it is the fit's own"
    assert model.error_p90 < 1e-3
    slower = [StepTiming(s.prefill_tokens, s.decode_seqs, s.context_tokens, 2 * s.elapsed_s)
              for s in STEPS]  # fmt: skip
    state.observe("w", slower[:31])
    state.observe("w", slower[31:34] + slower)
    model = state.model("w")
    assert model is not None
    assert (model.version, model.error_steps) == (2, 31 + 3 + len(STEPS))
    assert model.error_p50 == pytest.approx(0.5, rel=1e-3)
    assert model.error_p90 == pytest.approx(0.5, rel=1e-3)


def test_errors_by_hand() -> None:
    errors = Errors()
    for number in range(Errors.FEWEST - 1):
        errors.add(1.0 + number / 100, 1.0)
    assert errors.quantiles() is None
    errors.add(0.5, 1.0)
    median, p90 = errors.quantiles() or (nan, nan)
    values = sorted([number / 100 for number in range(31)] + [0.5])
    assert median == pytest.approx((values[15] + values[16]) / 2)
    assert p90 == pytest.approx(values[27] + 0.9 * (values[28] - values[27]))  # (32 − 1)·0.9 = 27.9
    for _ in range(2 * Errors.WINDOW):
        errors.add(3.0, 2.0)
    assert errors.quantiles() == pytest.approx((0.5, 0.5))
    assert len(errors) == Errors.WINDOW
