"""Swap prices learned from measured swaps, per direction."""

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.costs import Direction, KVCosts, StepTiming, SwapTiming
from services.estimator.state import EstimatorState
from services.estimator.windows import SwapRates

OFFLOAD, UPLOAD = Direction.OFFLOAD, Direction.UPLOAD
STEPS = [
    StepTiming(16 * (i % 3), i % 5, 64 + i % 7, 0.002 + 0.001 * (i % 5) + 0.0016 * (i % 3))
    for i in range(1, 15)
]


def swaps(direction: Direction, token_s: float, *tokens: int) -> list[SwapTiming]:
    return [SwapTiming(direction, n, n * token_s) for n in tokens]


def learnt(timings: list[SwapTiming]) -> SwapRates:
    rates = SwapRates()
    assert all(rates.add(timing) for timing in timings)
    return rates


def test_swap_directions_have_separate_rates() -> None:
    rates = learnt(swaps(OFFLOAD, 2e-6, 160, 320, 640) + swaps(UPLOAD, 5e-6, 160, 16, 32))
    assert rates.token_s(OFFLOAD) == pytest.approx(2e-6)
    assert rates.token_s(UPLOAD) == pytest.approx(5e-6)


def test_swap_device_time_matches_worked_example() -> None:
    """Gathering takes 1 of 4 µs per token out, scattering 0.5 of 2 µs in: 1.5 µs in total. A part
    larger than the whole is ignored."""
    rates = learnt([SwapTiming(OFFLOAD, 100, 4e-4, 1e-4)] * 3)
    assert rates.quantize_token_s == pytest.approx(1e-6)
    for timing in [SwapTiming(UPLOAD, 100, 2e-4, 5e-5)] * 3 + [
        SwapTiming(UPLOAD, 9, 1e-6, 1.0)
    ] * 9:
        assert rates.add(timing)
    assert rates.quantize_token_s == pytest.approx(1.5e-6)


def test_two_swaps_give_no_swap_rate() -> None:
    rates = learnt(swaps(OFFLOAD, 1e-6, 100, 100))
    assert (rates.token_s(OFFLOAD), rates.token_s(UPLOAD)) == (0, 0)


@pytest.mark.parametrize(
    ("tokens", "elapsed_s"), [(0, 1.0), (-5, 1.0), (9, 0.0), (9, -1.0), (9, nan), (9, inf)]
)
def test_invalid_swap_is_rejected(tokens: int, elapsed_s: float) -> None:
    rates = SwapRates()
    assert not rates.add(SwapTiming(OFFLOAD, tokens, elapsed_s))


def test_large_swaps_weigh_more() -> None:
    """Half of 1,240 tokens is reached within the swap of 1,000."""
    rates = learnt(swaps(OFFLOAD, 9e-6, 80, 80, 80) + swaps(OFFLOAD, 1e-6, 1_000))
    assert rates.token_s(OFFLOAD) == pytest.approx(1e-6)


def test_swap_rate_ignores_pauses() -> None:
    rng = np.random.default_rng(0)
    sound = [
        SwapTiming(UPLOAD, n, n * 3e-6 * float(rng.lognormal(0, 0.1)))
        for n in map(int, rng.integers(16, 4_096, 200))
    ]
    paused = swaps(UPLOAD, 1e-2, *[500] * 25) + swaps(UPLOAD, 1e-12, *[500] * 25)
    assert learnt(sound + paused).token_s(UPLOAD) == pytest.approx(3e-6, rel=0.05)


def test_swap_rate_follows_slower_worker_and_is_bounded() -> None:
    rates = learnt(swaps(OFFLOAD, 1e-6, *[64] * 1_000))
    for timing in swaps(OFFLOAD, 4e-6, *[64] * 200):
        rates.add(timing)
    assert rates.token_s(OFFLOAD) == pytest.approx(4e-6)


@given(st.lists(st.tuples(st.floats(1e-9, 1), st.integers(1, 50)), min_size=3, max_size=40))
def test_swap_rate_matches_reference_implementation(seen: list[tuple[float, int]]) -> None:
    """The reference repeats each sample once per token and takes the median."""
    timings = [SwapTiming(OFFLOAD, n, n * token_s) for token_s, n in seen]
    every = sorted(t.elapsed_s / t.tokens for t in timings for _ in range(t.tokens))
    assert learnt(timings).token_s(OFFLOAD) == every[(len(every) - 1) // 2]


def test_first_cost_model_includes_earlier_swaps() -> None:
    state = EstimatorState()
    seen = state.observe("w", [], swaps(OFFLOAD, 1e-6, 64, 64, 64))
    assert (seen.version, seen.changed) == (0, False)
    seen = state.observe("w", STEPS)
    assert (seen.version, seen.refitted, seen.repriced) == (1, True, False)
    model = state.model("w")
    assert model is not None
    assert model.offload_token_s == pytest.approx(1e-6)
    assert model.kv_costs == KVCosts(model.prefill_token_s, model.offload_token_s, 0)


def test_changed_swap_price_makes_a_new_cost_model_version() -> None:
    state = EstimatorState()
    state.observe("w", STEPS)
    fitted = state.model("w")
    assert fitted is not None

    transcript = [
        (swaps(UPLOAD, 1e-6, 64, 64), 1),  # too few samples
        (swaps(UPLOAD, 1e-6, 64), 2),  # the first price
        (swaps(UPLOAD, 1.05e-6, *[64] * 9), 2),  # about the same
        (swaps(UPLOAD, 2e-6, *[64] * 40), 3),
        (swaps(OFFLOAD, 2e-6, *[64] * 3), 4),  # first price of the other direction
        ([SwapTiming(OFFLOAD, 0, 1.0)], 4),
    ]
    for timings, version in transcript:
        assert state.observe("w", [], timings).version == version
    model = state.model("w")
    assert model is not None
    assert (model.offload_token_s, model.upload_token_s) == pytest.approx((2e-6, 2e-6))
    assert model.step_s(100, 10, 1_000) == fitted.step_s(100, 10, 1_000)


def test_steps_and_swaps_together_make_one_cost_model_version() -> None:
    state = EstimatorState()
    seen = state.observe("w", STEPS, [*swaps(UPLOAD, 1e-6, 64, 64, 64), SwapTiming(UPLOAD, 9, nan)])
    assert (seen.version, seen.refitted, seen.repriced, seen.swaps_kept) == (1, True, False, 3)


def test_swap_prices_are_separate_per_worker() -> None:
    state = EstimatorState()
    for worker_id, token_s in (("a", 1e-6), ("b", 7e-6)):
        state.observe(worker_id, STEPS, swaps(UPLOAD, token_s, 64, 64, 64))
    models = [state.model(worker_id) for worker_id in ("a", "b")]
    assert [m.upload_token_s if m else 0 for m in models] == pytest.approx([1e-6, 7e-6])
