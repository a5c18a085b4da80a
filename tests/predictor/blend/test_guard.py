"""Scoring of forecasts, and the guard that sets an inaccurate model aside."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import isnan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, ks_2samp

from lab.evaluation.scores import score
from services.core import LiveAnswers
from services.forecast import Forecast, certain, from_lengths
from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.guard import (
    MIN_OUTCOMES,
    WINDOW,
    ApplicationGuards,
    Decision,
    ModelGuard,
)
from services.predictor.blend.guarded_forecaster import GuardedForecaster, PureForecaster
from services.predictor.interface import LAYERS, NUMBERS, Example, Features, Options, Prompt, Query
from services.predictor.learning.scorecard import (
    RECENT,
    JudgedForecast,
    Scorecard,
    distance,
    judge,
    tau_b,
)
from services.predictor.models.history import HistoryPredictor
from services.predictor.predictors import PREDICTORS
from tests.examples import examples
from tests.predictor.predictor_serving import ended, input_of, predicting

FEATURES = Features(
    np.zeros((LAYERS, 8), np.float32),
    np.zeros((LAYERS, 8), np.float32),
    np.zeros(0, np.int32),
    np.zeros(len(NUMBERS), np.float32),
)
QUARTERS = Forecast((10.0, 20.0, 30.0, 40.0), (0.25, 0.25, 0.25, 0.25), 40)


def test_judge_matches_worked_example() -> None:
    judged = judge(QUARTERS, 20, 1_000)
    assert (judged.mean, judged.level, judged.inside_50, judged.inside_90) == (
        25,
        0.375,
        True,
        True,
    )
    assert judge(QUARTERS, 41, 1_000).level == 1 and judge(QUARTERS, 5, 1_000).level == 0
    assert not judge(QUARTERS, 40, 1_000).inside_50 and judge(QUARTERS, 40, 1_000).inside_90
    assert not judge(QUARTERS, 41, 1_000).inside_90
    # One point: every quantile is 30 and the mean level is 1/2.
    assert judge(certain(30), 50, 1_000).pinball_tokens == pytest.approx(10)


def test_judge_truncates_forecast_at_max_tokens() -> None:
    assert judge(certain(500), 64, max_tokens=64).pinball_tokens == 0


@given(st.lists(st.integers(1, 60), min_size=1, max_size=80), st.integers(1, 60))
def test_judge_equals_offline_scores(lengths: list[int], tokens: int) -> None:
    forecast = from_lengths(lengths, 60, "history")
    judged, expected = judge(forecast, tokens, 60), score([forecast], [tokens])
    assert judged.pinball_tokens == pytest.approx(expected.pinball)
    assert judged.inside_50 == bool(expected.coverage_50)
    assert judged.inside_90 == bool(expected.coverage_90)


pairs = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=40)


@given(pairs)
def test_tau_and_distance_match_scipy(values: list[tuple[int, int]]) -> None:
    a, b = np.array(values, float).T
    expected = kendalltau(a, b).statistic
    assert tau_b(a, b) == pytest.approx(expected, nan_ok=True)
    recent = np.resize(b, RECENT)
    assert distance(a, recent) == pytest.approx(ks_2samp(a, recent).statistic)


def judgement(level: float, tokens: int = 10) -> JudgedForecast:
    return JudgedForecast(float(tokens), tokens, level, level < 0.5, level < 0.9, 2.0)


def test_scorecard_covers_last_thousand() -> None:
    card = Scorecard()
    assert isnan(card.scores().tau) and card.scores().count == 0
    card.add(judgement(0.99) for _ in range(500))
    card.add(judgement(i / 1_000, i) for i in range(1_000))
    scores = card.scores()
    assert (scores.count, scores.tau, scores.pinball_tokens) == (1_000, 1.0, 2.0)
    assert (scores.coverage_50, scores.coverage_90) == (0.5, 0.9)


def test_drift_measures_change_of_calibration() -> None:
    steady, moved = Scorecard(), Scorecard()
    levels = np.random.default_rng(0).random(1_000)
    steady.add(judgement(level) for level in levels)
    moved.add(judgement(level if i < 750 else level / 2) for i, level in enumerate(levels))
    assert steady.scores().drift < 0.1
    assert 0.4 < moved.scores().drift < 0.6


def test_guard_needs_minimum_outcomes() -> None:
    guard = ModelGuard()
    assert not guard.observe([5.0] * (MIN_OUTCOMES - 1)) and not guard.set_aside
    assert guard.observe([5.0]) and guard.set_aside


def test_guard_follows_a_difference_that_the_noise_does_not_explain() -> None:
    noise = np.random.default_rng(0).normal(size=4_000)
    guard = ModelGuard()
    changed = [i for i, each in enumerate((noise + 0.5).tolist()) if guard.observe([each])]
    assert len(changed) == 1 and changed[0] < WINDOW and guard.set_aside
    changed = [i for i, each in enumerate((noise - 0.5).tolist()) if guard.observe([each])]
    assert len(changed) == 1 and changed[0] < WINDOW and not guard.set_aside


@pytest.mark.parametrize("aside", [False, True])
@given(seed=st.integers(0, 2**32 - 1), burst=st.sampled_from([1, 4, 10]))
@settings(max_examples=examples(60), deadline=None)
def test_guard_keeps_its_decision_between_equally_accurate_models(
    aside: bool, seed: int, burst: int
) -> None:
    guard = ModelGuard()
    guard.set_aside = aside
    draw = np.random.default_rng(seed)
    losses = np.repeat(draw.exponential(size=3_000 // burst), burst)
    signs = np.repeat(draw.choice([-1.0, 1.0], size=3_000 // burst), burst)
    changes = sum(guard.observe(part.tolist()) for part in np.split(losses * signs, 300))
    assert changes <= 1


def test_guard_reinstates_better_model_without_flapping() -> None:
    guard = ModelGuard()
    assert not any(guard.observe([1.0 if (i // 50) % 2 else -1.0]) for i in range(4_000))
    guard = ModelGuard()
    guard.observe([5.0] * MIN_OUTCOMES)
    assert guard.set_aside
    assert not guard.observe([-1.0] * (MIN_OUTCOMES - 1))
    assert guard.observe([-1.0]) and not guard.set_aside


COPY, CHAT, SORT = (("demo", name) for name in ("copy", "chat", "sort"))


def test_guards_judge_each_application_by_itself() -> None:
    guards = ApplicationGuards()
    assert guards.observe(COPY, [5.0] * MIN_OUTCOMES) == Decision(COPY, set_aside=True)
    assert guards.observe(CHAT, [-5.0] * MIN_OUTCOMES) is None
    assert [guards.is_set_aside(each) for each in (COPY, CHAT, SORT)] == [True, False, False]
    assert guards.observe(COPY, [-5.0] * MIN_OUTCOMES) == Decision(COPY, set_aside=False)
    assert guards.count_set_aside == 0


def test_applications_with_few_outcomes_are_judged_together_until_they_have_enough() -> None:
    guards = ApplicationGuards()
    half = [5.0] * (MIN_OUTCOMES // 2)
    assert guards.observe(COPY, half) is None
    assert guards.observe(CHAT, half) == Decision(None, set_aside=True)
    assert guards.is_set_aside(COPY) and guards.is_set_aside(SORT)
    assert guards.count_set_aside == 1
    assert guards.observe(SORT, [-5.0] * MIN_OUTCOMES) == Decision(SORT, set_aside=False)
    assert guards.is_set_aside(COPY) and not guards.is_set_aside(SORT)


def test_guards_follow_a_bounded_number_of_applications() -> None:
    guards = ApplicationGuards(applications=2)
    for application in (COPY, CHAT):
        guards.observe(application, [5.0] * MIN_OUTCOMES)
    guards.observe(COPY, [5.0])
    guards.observe(SORT, [0.0])  # replaces the least recently observed one
    assert [guards.is_set_aside(each) for each in (COPY, CHAT, SORT)] == [True, False, False]


def test_decisions_name_what_they_are_about() -> None:
    subjects = [Decision(each, True).subject for each in (COPY, ("demo", ""), None)]
    few = "applications with few outcomes"
    assert subjects == ["application 'copy' of demo", "demo without an application", few]


class Scripted:
    """Forecasts one fixed length for every readable request."""

    version = 0
    edition = 0

    def __init__(self, tokens: int):
        self.tokens = tokens

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [certain(self.tokens, "model" if q.features else "history") for q in batch]

    def by_words(self, batch: Sequence[Query]) -> list[Forecast | None]:
        return [certain(2 * self.tokens, "words") if q.prompt else None for q in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        return len(examples)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""


def test_guarded_forecaster_selects_forecast() -> None:
    guarded = GuardedForecaster(HistoryPredictor(), Scripted(5))
    without_prompt, history = (
        Query("demo", "", 1, 50),
        HistoryPredictor().forecast([Query("demo", "", 1, 5)]),
    )
    made = guarded.forecast([without_prompt])[0]
    assert (made.given, made.by_model) == (history[0], None)
    made = guarded.forecast([replace(without_prompt, prompt=Prompt("", "hello", 1))])[0]
    assert made.given == made.by_model == certain(10, "words")

    read, unread = guarded.read([replace(without_prompt, features=FEATURES), without_prompt])
    assert (read, unread) == (certain(5, "model"), None)
    assert read is not None
    made = guarded.choose(without_prompt, read, history[0])
    assert (made.given, made.by_model, made.by_history) == (read, read, history[0])
    assert guarded.compare(("demo", ""), [1.0] * MIN_OUTCOMES) == Decision(("demo", ""), True)
    assert guarded.set_aside == 1
    made = guarded.choose(without_prompt, read, history[0])
    assert (made.given.source, made.by_model) == ("history", read)
    other = replace(without_prompt, application="chat")
    assert guarded.choose(other, read, history[0]).given is read


def test_pure_forecaster_gives_the_model_alone() -> None:
    guarded = PureForecaster(HistoryPredictor(), Scripted(5))
    query = Query("demo", "", 1, 50, prompt=Prompt("", "hello", 1))
    made = guarded.forecast([query])[0]
    assert (made.given, made.by_model) == (certain(50), None)  # neither words nor history
    [read] = guarded.read([replace(query, features=FEATURES)])
    assert read == certain(5, "model")
    assert not guarded.compare(("demo", ""), [1.0] * MIN_OUTCOMES) and not guarded.set_aside
    assert guarded.choose(query, read, made.by_history).given is read


class FixedModel(ContentPredictor):
    """Reads prompts and forecasts `tokens` for each."""

    tokens = 900

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        history = super().forecast(batch)
        return [
            certain(self.tokens, "fixed") if query.features else other
            for query, other in zip(batch, history, strict=True)
        ]


async def test_inaccurate_model_is_set_aside_and_reinstated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fixed = FixedModel("fixed", {}, Options())
    monkeypatch.setitem(PREDICTORS, "fixed", lambda _: fixed)
    with caplog.at_level(logging.WARNING):
        async with predicting("fixed") as running:
            improved: list[float] = []

            async def hundred(turn: int, forecast_of: int, tokens: int) -> str:
                fixed.tokens = forecast_of
                ids = [f"{turn}-{i}" for i in range(100)]
                already = running.value("read_total", of="waiting")
                await running.forecast(*(input_of(i, f"question {i}") for i in ids))
                await running.read(int(already) + 100)
                reported = running.value("improved_total")
                await running.observe(*(ended(i, tokens) for i in ids))
                improved.append(reported - sum(improved))
                return "fixed" if improved[-1] else "history"

            assert [await hundred(turn, 900, 20) for turn in (0, 1, 2)] == ["fixed"] * 3
            assert running.value("set_aside") == 1
            good = [await hundred(n, n, n) for n in (20, 200, 21, 201, 22)]
            assert (good[0], good[-1]) == ("history", "fixed")
            assert running.value("set_aside") == 0
            message = [r.getMessage() for r in caplog.records]
    assert [line for line in message if "set aside" in line or "is used" in line] == [
        "the prompt model is less accurate than history for demo without an application and is set "
        "aside there; it continues to learn",
        "the prompt model is more accurate than history again for demo without an application and "
        "is used",
    ]
