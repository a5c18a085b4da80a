"""Forecasts and learning of the history and max predictors."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import FinishReason, LiveAnswers
from services.forecast import UNCAPPED, Forecast, from_lengths
from services.predictor.interface import Example, Options, Query
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.oracle import OraclePredictor
from services.predictor.predictors import PLAIN, PREDICTORS, READS, build


def outcome(
    length: int, application: str = "", model: str = "demo", reason: str = "stop"
) -> Example:
    return Example(Query(model, application, 10, 4_096), length, FinishReason(reason))


def ask(predictor: HistoryPredictor, application: str = "", max_tokens: int = 100) -> Forecast:
    return predictor.forecast([Query("demo", application, 10, max_tokens)])[0]


def test_history_without_outcomes_forecasts_max_tokens() -> None:
    for application in ("", "copy"):
        cold = ask(HistoryPredictor(), application)
        assert cold == Forecast((UNCAPPED,), (1.0,), UNCAPPED, "history", 0, "history/demo")
        assert cold.truncated(77).points == (77,)


def test_history_is_distribution_of_outcomes_plus_prior() -> None:
    predictor = HistoryPredictor()
    assert predictor.learn([outcome(n) for n in (5, 9, 5, 7)]) == 4
    made = ask(predictor)
    assert (made.points, made.max_tokens) == ((5, 7, 9, UNCAPPED), UNCAPPED)
    assert made.weights == pytest.approx((0.4, 0.2, 0.2, 0.2))
    assert (made.source, made.version, made.shared_key) == ("history", 4, "history/demo")


def test_seeded_history_starts_with_a_window_of_max_tokens() -> None:
    """Past-Future's window of 4 entries of max_tokens, of which outcomes replace one each."""
    predictor = build("history-seeded", Options(window=4))
    assert isinstance(predictor, HistoryPredictor)
    for outcomes, longest in ((1, 0.75), (2, 0.5), (3, 0.25)):
        predictor.learn([outcome(5)])
        made = ask(predictor)
        assert made.points == (5, UNCAPPED), outcomes
        assert made.weights == pytest.approx((1 - longest, longest))
    predictor.learn([outcome(5)])
    assert ask(predictor).points == (5,)


def live(*tokens: int, application: str = "", model: str = "demo") -> LiveAnswers:
    return LiveAnswers(model, application, tokens)


def test_version_follows_changes_by_live_answers() -> None:
    """One answer of 5 tokens has ended, and two are longer until they are gone."""
    predictor = HistoryPredictor()
    predictor.observe_live([live(9)])  # no population yet
    assert predictor.version == 0
    predictor.learn([outcome(5)])
    ended = ask(predictor)
    predictor.observe_live([live(9, 20)])
    longer = ask(predictor)
    assert longer.weights == pytest.approx((1 / 4, 3 / 4))
    assert (predictor.version, longer.version) == (2, ended.version + 1)
    predictor.observe_live([live(9, model="other")])
    assert (ask(predictor).weights, predictor.version) == (ended.weights, 3)
    predictor.observe_live([])
    assert predictor.version == 3


def test_live_answers_of_an_application_count_for_its_model() -> None:
    predictor = HistoryPredictor(Options(application_min=1))
    predictor.learn([outcome(5), outcome(5, application="copy")])
    predictor.observe_live([live(9, application="copy"), live(7)])
    assert ask(predictor).weights == pytest.approx((2 / 5, 3 / 5))
    assert ask(predictor, "copy").weights == pytest.approx((1 / 3, 2 / 3))


def test_history_is_not_dominated_by_one_short_answer() -> None:
    predictor = HistoryPredictor()
    predictor.learn([outcome(5)])
    assert ask(predictor).truncated(1_024) == Forecast(
        (5.0, 1_024.0), (0.5, 0.5), 1_024, "history", 1, "history/demo"
    )


def test_history_shares_one_forecast_object() -> None:
    predictor = HistoryPredictor(Options(window=2))
    predictor.learn([outcome(50), outcome(200)])
    one, other = ask(predictor, max_tokens=60), ask(predictor, max_tokens=900)
    assert one is other and one.points == (50, 200)
    assert (one.truncated(60).points, one.truncated(900).max_tokens) == ((50, 60), 900)


def test_history_learns_only_finished_answers() -> None:
    predictor = HistoryPredictor()
    cut_short = [outcome(3, reason=r) for r in ("deadline", "cancelled", "error")]
    assert predictor.learn([*cut_short, outcome(0), outcome(8), outcome(9, reason="length")]) == 2
    assert (ask(predictor).points, predictor.version) == ((8, 9, UNCAPPED), 2)


def test_history_window_evicts_oldest() -> None:
    predictor = HistoryPredictor(Options(window=3))
    predictor.learn([outcome(n) for n in (1, 2, 3, 4)])
    assert ask(predictor).points == (2, 3, 4)


def test_application_uses_own_outcomes_once_sufficient() -> None:
    predictor = HistoryPredictor(Options(application_min=3))
    predictor.learn([outcome(100, "list"), outcome(4, "copy"), outcome(5, "copy")])
    before = ask(predictor, "copy")
    assert (before.points, before.shared_key) == ((4, 5, 100, UNCAPPED), "history/demo")

    predictor.learn([outcome(6, "copy")])
    after = ask(predictor, "copy")
    assert (after.points, after.shared_key, after.version) == (
        (4, 5, 6, UNCAPPED),
        "history/demo/copy",
        3,
    )
    assert ask(predictor, "list").shared_key == "history/demo"
    assert ask(predictor).points == (4, 5, 6, 100, UNCAPPED)


def test_history_separates_models_and_escapes_slashes() -> None:
    predictor = HistoryPredictor(Options(application_min=1))
    predictor.learn([outcome(1, model="a/b"), outcome(2, "b", model="a")])
    one, two = predictor.forecast([Query("a/b", "", 1, 9), Query("a", "b", 1, 9)])
    assert (one.points, one.shared_key) == ((1, UNCAPPED), "history/a%2Fb")
    assert (two.points, two.shared_key) == ((2, UNCAPPED), "history/a/b")


def test_version_increases_and_forecast_is_built_once() -> None:
    predictor = HistoryPredictor()
    predictor.learn([outcome(5)])
    first, second = ask(predictor, max_tokens=5), ask(predictor, max_tokens=5)
    assert first is second
    predictor.learn([outcome(3, reason="cancelled")])
    assert ask(predictor, max_tokens=5) is first
    predictor.learn([outcome(6)])
    assert ask(predictor).version > first.version


def test_history_bounds_number_of_populations() -> None:
    predictor = HistoryPredictor(Options(application_min=1, populations_max=3))
    for i in range(10):
        predictor.learn([outcome(i + 1, f"app{i}")])
    assert ask(predictor, "app9").shared_key == "history/demo/app9"
    assert ask(predictor, "app0").shared_key == "history/demo"
    assert ask(predictor).version == 10


@given(st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 50)), max_size=60))
def test_history_matches_reference_implementation(events: list[tuple[str, int]]) -> None:
    window, least = 10, 4
    predictor = HistoryPredictor(Options(window, least))
    everything: deque[int] = deque(maxlen=window)
    by_application: dict[str, deque[int]] = {a: deque(maxlen=window) for a in ("a", "b")}
    for application, length in events:
        predictor.learn([outcome(length, application)])
        everything.append(length)
        if application:
            by_application[application].append(length)
        for asked in ("", "a", "b"):
            own = by_application.get(asked, everything)
            lengths = own if len(own) >= least else everything
            room = [UNCAPPED] if len(lengths) < window else []
            expected = from_lengths([*lengths, *room], UNCAPPED, "history")
            seen = ask(predictor, asked)
            assert seen.points == expected.points
            assert seen.weights == pytest.approx(expected.weights)


def test_max_forecasts_max_tokens_and_learns_nothing() -> None:
    predictor = OraclePredictor()
    assert predictor.learn([outcome(5)]) == 0
    assert predictor.forecast([Query("demo", "", 1, 30), Query("demo", "", 1, 40)]) == [
        Forecast((30.0,), (1.0,), 30, "max"),
        Forecast((40.0,), (1.0,), 40, "max"),
    ]


def test_predictors_are_built_by_name() -> None:
    assert set(PREDICTORS) == set(PLAIN) | set(READS)
    assert set(PLAIN) == {"history", "history-seeded", "max", "oracle"}
    assert isinstance(build("history", Options()), HistoryPredictor)
    assert isinstance(build("max", Options()), OraclePredictor)
    with pytest.raises(ValueError, match="unknown predictor 'psychic'; known: blend, class"):
        build("psychic", Options())
