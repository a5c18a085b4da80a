"""The linear cost model: accuracy, robustness and memory."""

from collections.abc import Iterable
from math import inf, nan

import numpy as np
import pytest

from services.costs import CostModel, StepTiming
from services.estimator.linear import fit
from services.estimator.state import EstimatorState
from services.estimator.windows import StepWindow

TRUE = CostModel(0.004, 0.00012, 0.0006, 0.0000002)


def timed(
    steps: Iterable[tuple[int, int, int]], rng: np.random.Generator, noise: float = 0.0
) -> list[StepTiming]:
    return [
        StepTiming(p, d, c, TRUE.step_s(p, d, c) * float(rng.lognormal(0, noise)))
        for p, d, c in steps
    ]


def mixed(rng: np.random.Generator, count: int) -> list[tuple[int, int, int]]:
    steps = []
    for _ in range(count):
        prefill, decode = int(rng.integers(0, 512)), int(rng.integers(0, 65))
        steps.append((prefill, decode, prefill + decode * int(rng.integers(16, 2_000))))
    return steps


def coefficients(model: CostModel | None) -> tuple[float, float, float, float]:
    assert model is not None
    return model.base_s, model.prefill_token_s, model.decode_seq_s, model.context_token_s


def test_exact_timings_give_exact_model() -> None:
    rng = np.random.default_rng(0)
    model = fit(timed(mixed(rng, 64), rng))
    assert coefficients(model) == pytest.approx(coefficients(TRUE), rel=1e-4)
    assert model is not None
    assert (model.version, model.source, model.samples) == (0, "linear", 64)
    assert model.error_p90 < 1e-5


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noisy_timings_give_unbiased_model(noise: float) -> None:
    rng = np.random.default_rng(1)
    model = fit(timed(mixed(rng, 2_000), rng, noise))
    assert coefficients(model)[1:] == pytest.approx(coefficients(TRUE)[1:], rel=0.5 * noise)
    assert model is not None
    assert model.step_s(256, 32, 20_000) == pytest.approx(TRUE.step_s(256, 32, 20_000), rel=0.02)
    assert model.error_p50 == pytest.approx(0.674 * noise, rel=0.15)
    assert model.error_p50 < model.error_p90


def test_fit_ignores_pauses_and_broken_clocks() -> None:
    rng = np.random.default_rng(2)
    samples = timed(mixed(rng, 1_000), rng, 0.05)
    for i in range(0, 1_000, 50):
        s = samples[i]
        junk = 5.0 if i % 100 else 1e-9
        samples[i] = StepTiming(s.prefill_tokens, s.decode_seqs, s.context_tokens, junk)
    model = fit(samples)
    assert model is not None
    for step in ((512, 0, 512), (0, 64, 60_000), (100, 10, 5_000)):
        assert model.step_s(*step) == pytest.approx(TRUE.step_s(*step), rel=0.05)


def test_fit_ignores_warm_up_and_busy_host() -> None:
    """A tenth of the steps takes 3 to 30 times as long: one-sided noise."""
    rng = np.random.default_rng(10)
    samples = timed(mixed(rng, 1_000), rng, 0.05)
    for i in range(0, 1_000, 10):
        s = samples[i]
        paused_s = s.elapsed_s * float(rng.uniform(3, 30))
        samples[i] = StepTiming(s.prefill_tokens, s.decode_seqs, s.context_tokens, paused_s)
    model = fit(samples)
    assert model is not None
    for step in ((512, 0, 512), (0, 64, 60_000), (0, 1, 100), (100, 10, 5_000)):
        assert model.step_s(*step) == pytest.approx(TRUE.step_s(*step), rel=0.03)


READ = [(16, 0, 16), (64, 0, 64), (256, 0, 256)]
DECODED = [(0, n, n * length) for n in (1, 4, 16) for length in (20, 300)]


@pytest.mark.parametrize(
    ("why", "steps"),
    [
        ("decode steps alone, as a restarted estimator sees them", DECODED),
        ("full batches of one length: base, sequences and context are one", [(0, 32, 16_000)]),
        ("prompts of one size: their slope and the base are one", [(64, 0, 64), *DECODED]),
        ("no decode step", READ),
        ("every context 16 tokens a sequence", [*READ, (0, 1, 16), (0, 4, 64), (0, 16, 256)]),
        ("no context was reported", [(p, d, 0) for p, d, _ in READ + DECODED]),
    ],
)
def test_underdetermined_samples_give_no_model(why: str, steps: list[tuple[int, int, int]]) -> None:
    rng = np.random.default_rng(3)
    assert fit(timed(steps * 10, rng)) is None
    assert fit(timed(steps * 10, rng, 0.05)) is None


def test_few_varied_steps_determine_model() -> None:
    """Single sequences suffice if prompts and contexts differ."""
    steps = [*READ, (0, 1, 20), (0, 1, 150), (0, 1, 300)] * 2
    model = fit(timed(steps, np.random.default_rng(3)))
    assert coefficients(model) == pytest.approx(coefficients(TRUE), rel=0.02)


def test_zero_prefill_cost_gives_no_model() -> None:
    steps = [StepTiming(p, d, c, 0.01 / (1 + p)) for p, d, c in (READ + DECODED) * 3]
    assert fit(steps) is None


def test_coefficients_are_never_negative() -> None:
    """Steps that get faster with more decodes have a negative slope in plain least squares."""
    rows = [StepTiming(0, n, 50 * n + n * n, 0.1 / n) for n in range(1, 40)]
    rows += [StepTiming(16 * n, 0, 16 * n, 0.1 + 0.001 * n) for n in range(1, 20)]
    assert min(coefficients(fit(rows))) >= 0


def test_model_stays_until_new_fit_is_determined() -> None:
    rng = np.random.default_rng(9)
    state = EstimatorState(refit_samples=8)
    known = state.observe("w", timed([*READ, *DECODED] * 2, rng))
    assert (known.version, known.refitted) == (1, True)
    slower = [StepTiming(p, d, c, 0.01 / (1 + p)) for p, d, c in READ * 8]
    after = state.observe("w", slower)
    assert (after.version, after.refitted) == (1, False)
    assert coefficients(state.model("w")) == pytest.approx(coefficients(TRUE), rel=0.02)


def test_too_few_samples_give_no_model() -> None:
    rng = np.random.default_rng(4)
    assert fit(timed(mixed(rng, 7), rng)) is None
    assert fit([]) is None


def test_invalid_timings_are_dropped_and_counted() -> None:
    state = EstimatorState()
    junk = [
        StepTiming(10, 0, 10, 0.0),
        StepTiming(10, 0, 10, -1.0),
        StepTiming(10, 0, 10, nan),
        StepTiming(10, 0, 10, inf),
        StepTiming(0, 0, 0, 1.0),
    ]
    seen = state.observe("w", junk)
    assert (seen.version, seen.dropped, seen.refitted) == (0, 5, False)
    assert state.model("w") is None


def test_coverage_keeps_prefill_during_long_decode() -> None:
    rng = np.random.default_rng(5)
    state = EstimatorState(refit_samples=1_000)
    profile = [(2**k, 0, 2**k) for k in range(4, 10)] + [(0, 2**k, 2**k * 64) for k in range(7)]
    state.observe("w", timed(profile * 3, rng, 0.02))
    for _ in range(30):
        hour = [(0, 60, int(rng.integers(20_000, 60_000))) for _ in range(1_000)]
        state.observe("w", timed(hour, rng, 0.02))
    model = state.model("w")
    assert model is not None
    assert model.step_s(512, 0, 512) == pytest.approx(TRUE.step_s(512, 0, 512), rel=0.1)
    assert model.step_s(0, 60, 40_000) == pytest.approx(TRUE.step_s(0, 60, 40_000), rel=0.1)
    assert model.step_s(0, 1, 64) == pytest.approx(TRUE.step_s(0, 1, 64), rel=0.1)


def test_coverage_keeps_latest_of_each_kind() -> None:
    coverage = StepWindow(window=240)
    for i in range(500):
        assert coverage.add(StepTiming(0, 4, 100, 1.0 + i))
    assert [t.elapsed_s for t in coverage] == [1.0 + i for i in range(492, 500)]
    for i in range(1, 5_000):
        coverage.add(StepTiming(i, i % 7, i * i, 1.0))
    assert len(coverage) <= 240
    shapes = {(t.prefill_tokens > 0, t.decode_seqs > 0) for t in coverage}
    assert shapes == {(True, False), (False, True), (True, True)}


def test_version_increases_by_one_per_spaced_refit() -> None:
    rng = np.random.default_rng(6)
    state = EstimatorState(refit_samples=64)
    versions = [
        state.observe("w", timed(mixed(rng, count), rng)).version
        for count in (4, 4, 63, 1, 1, 200, 63)
    ]
    assert versions == [0, 1, 1, 2, 2, 3, 3]


def test_refits_of_fast_steps_are_apart_by_the_interval() -> None:
    """Every message has enough samples; the first model waits for nothing."""
    rng = np.random.default_rng(8)
    state = EstimatorState(refit_samples=8, refit_interval_s=2.0)
    times_s = (100.0, 100.1, 101.9, 102.0, 102.1, 104.0)
    seen = [state.observe("w", timed(mixed(rng, 24), rng), now=at_s) for at_s in times_s]
    assert [each.version for each in seen] == [1, 1, 1, 2, 2, 3]
    assert [each.refitted for each in seen] == [True, False, False, True, False, True]


def test_fit_follows_slower_worker() -> None:
    rng = np.random.default_rng(7)
    state = EstimatorState()
    steps = [(0, 8, 8 * 64), (0, 1, 64), (16, 0, 16), (64, 0, 64), (32, 8, 600)] * 8
    state.observe("w", timed(steps, rng))
    slower = [StepTiming(p, d, c, 2 * TRUE.step_s(p, d, c)) for p, d, c in steps]
    for _ in range(4):
        state.observe("w", slower)
    model = state.model("w")
    assert model is not None
    assert model.step_s(32, 8, 600) == pytest.approx(2 * TRUE.step_s(32, 8, 600), rel=0.01)


def test_workers_are_separate_and_bounded() -> None:
    rng = np.random.default_rng(8)
    state = EstimatorState(workers_max=2)
    for worker in ("a", "b", "a", "c"):
        state.observe(worker, timed(mixed(rng, 10), rng))
    assert [state.model(w) is None for w in ("a", "b", "c")] == [False, True, False]
