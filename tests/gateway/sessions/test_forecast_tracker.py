"""Forecasts of a choice for its client: by hand, and properties for any forecast."""

from math import exp, inf, isfinite

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.forecast_tracker import ForecastTracker
from gateway.sessions.ttft_promises import MIN_ERRORS, TtftPromises
from gateway.types.forecasts import ClientForecast, SchedulerForecast
from services.core import Sla
from services.forecast import UNCAPPED, Forecast, certain
from services.sla import RequestTimeline
from tests.core.forecasts import forecasts

QUARTERS = Forecast((10.0, 20.0, 40.0, 100.0), (0.25,) * 4, UNCAPPED, "history")
BATCH = Sla()
RARELY_LONG = Forecast((10.0, 1000.0), (0.96, 0.04), UNCAPPED)


def make_tracker(
    forecast: Forecast = QUARTERS,
    token_s: float = 0.1,
    ttft_s: float | None = 0.5,
    most: int = 100,
    sla: Sla = BATCH,
    promises: TtftPromises | None = None,
) -> ForecastTracker:
    """A tracker of a choice that arrived at 10 s, with a forecast. An uncalibrated promise is twice
    the expectation plus 20 ms."""
    tracker = ForecastTracker(sla, most, 10.0, promises or TtftPromises())
    tracker.update(SchedulerForecast(forecast, token_s, ttft_s))
    return tracker


def next_forecast(
    tracker: ForecastTracker, sent: int, now_s: float = 10.0, over: bool = False
) -> ClientForecast:
    reported = tracker.next_chunk(sent, over, now_s)
    assert reported is not None
    return reported


@pytest.mark.parametrize(
    ("forecast", "most", "sent", "low", "expected", "high"),
    [
        (QUARTERS, 100, 0, 10, (10 + 20 + 40 + 100) / 4, 100),
        (QUARTERS, 100, 9, 10, 42.5, 100),
        (QUARTERS, 100, 10, 20, (20 + 40 + 100) / 3, 100),
        (QUARTERS, 100, 25, 40, 70, 100),
        (QUARTERS, 100, 99, 100, 100, 100),
        (QUARTERS, 60, 0, 10, (10 + 20 + 40 + 60) / 4, 60),  # truncated at max_tokens
        (QUARTERS, 10, 0, 10, 10, 10),
        (certain(50), 100, 0, 50, 50, 50),
        # Longer than the forecast: 50 more tokens on average, cut at max_tokens.
        (certain(50), 100, 50, 52, 50 + 50 * (1 - exp(-1)), 100),
        (RARELY_LONG, 2000, 0, 10, 10, 10),  # the mean, 49.6, is replaced by the bound
        (RARELY_LONG, 2000, 10, 1000, 1000, 1000),
        (
            Forecast((2.4, 7.6), (0.5, 0.5), UNCAPPED),
            9,
            0,
            2,
            5,
            8,
        ),  # rounded outwards to whole tokens
        (Forecast((2.4, 7.6), (0.5, 0.5), UNCAPPED), 9, 2, 2, 5, 8),
    ],
)
def test_forecast_lengths_are_conditioned_on_the_sent_tokens(
    forecast: Forecast, most: int, sent: int, low: int, expected: float, high: int
) -> None:
    reported = next_forecast(make_tracker(forecast, most=most), sent)
    assert (reported.low_tokens, reported.high_tokens) == (low, high)
    assert reported.expected_tokens == pytest.approx(expected)


def test_end_is_estimated_from_the_promise_then_from_the_stream_s_pace() -> None:
    """Arrival at 10.0; expected: the first token at 10.5, and 0.1 s per token."""
    tracker = make_tracker()
    assert next_forecast(tracker, 0, 10.0).end_s == pytest.approx(0.5 + 41.5 * 0.1)
    assert next_forecast(tracker, 0, 10.4).end_s == pytest.approx(0.1 + 41.5 * 0.1)
    assert next_forecast(tracker, 0, 11.0).end_s == pytest.approx(
        41.5 * 0.1
    )  # late: expected at any moment
    assert next_forecast(tracker, 10, 11.0).end_s == pytest.approx((160 / 3 - 10) * 0.1)
    # 16 gaps in 0.8 s weigh as much as the forecast: between 0.05 and 0.1 s per token.
    assert next_forecast(tracker, 26, 11.8).end_s == pytest.approx((70 - 26) * 0.075)
    # 32 more in 1.6 s: 48 gaps in 2.4 s and 16 in 1.6 s.
    assert next_forecast(tracker, 58, 13.4).end_s == pytest.approx((100 - 58) * 4.0 / 64)
    assert next_forecast(tracker, 70, 14.0, over=True) == ClientForecast(70.0, 70, 70, 0.0)


def test_promise_is_sent_until_the_first_tokens() -> None:
    tracker = make_tracker(sla=Sla("interactive", 1.1, 0.1, 0.5))
    reported = [next_forecast(tracker, sent) for sent in (0, 0, 3, 4)]
    assert [each.ttft_s for each in reported] == [pytest.approx(1.02)] * 3 + [None]
    assert [each.sla_expected for each in reported] == [True, True, True, None]


def test_late_forecast_has_its_promise() -> None:
    tracker = ForecastTracker(Sla(), 100, 10.0, TtftPromises())
    assert not tracker.is_news
    assert tracker.next_chunk(3, False, 10.6) is None
    tracker.update(SchedulerForecast(QUARTERS, 0.1, 0.5))
    assert tracker.is_news
    # Four gaps in 0.4 s, blended with 16 of 0.1 s.
    late = next_forecast(tracker, 7, 11.0)
    assert (late.ttft_s, late.end_s) == pytest.approx((1.02, (42.5 - 7) * 0.1))
    assert not tracker.is_news
    assert next_forecast(tracker, 8, 11.1).ttft_s is None


def test_forecast_tracker_sends_nothing_without_a_forecast() -> None:
    tracker = ForecastTracker(Sla(), 100, 10.0, TtftPromises())
    assert tracker.next_chunk(5, True, 11.0) is None
    assert tracker.opening is None


def test_new_forecast_replaces_length_and_pace_but_not_the_promise() -> None:
    tracker = make_tracker(ttft_s=0.5)
    next_forecast(tracker, 0)
    tracker.update(SchedulerForecast(certain(30), 0.2, 2.0))
    reported = next_forecast(tracker, 0, 10.0)
    assert (reported.low_tokens, reported.expected_tokens, reported.high_tokens) == (30, 30.0, 30)
    assert reported.ttft_s == pytest.approx(1.02)
    assert reported.end_s == pytest.approx(2.0 + 29 * 0.2)  # by the newer expectation
    assert tracker.opening == next_forecast(make_tracker(), 0)


@pytest.mark.parametrize(
    ("sla", "expected"),
    [
        (Sla(), True),
        (Sla("c", 1.03, 0.1, 0.1), True),
        (
            Sla("c", 1.01, inf, inf),
            False,
        ),  # the expectation is within the budget, the promise is not
        (Sla("c", inf, 0.099, inf), False),
        (Sla("c", inf, inf, 0.099), False),
    ],
)
def test_sla_is_expected_if_promise_and_pace_are_within_budgets(sla: Sla, expected: bool) -> None:
    assert next_forecast(make_tracker(sla=sla), 0).sla_expected is expected


def test_resumed_request_has_no_promise() -> None:
    tracker = make_tracker(ttft_s=None)
    reported = next_forecast(tracker, 12)
    assert (reported.ttft_s, reported.sla_expected) == (None, None)
    assert tracker.is_promise_kept(delivered(0.1)) is None


def delivered(ttft_s: float, tokens: int = 5) -> RequestTimeline:
    """The timeline of a choice that arrived at 10 s, to its first token or its end."""
    timeline = RequestTimeline(10.0, ended_s=10.0 + ttft_s)
    if tokens:
        timeline.on_tokens(tokens, timeline.ended_s)
    return timeline


@pytest.mark.parametrize(
    ("timeline", "kept"),
    [
        (delivered(0.9), True),
        (delivered(1.1), False),
        (delivered(0.9, tokens=0), None),  # it ended before the promised time
        (delivered(1.1, tokens=0), False),
    ],
)
def test_promise_is_kept_by_a_first_token_sent_in_time(
    timeline: RequestTimeline, kept: bool | None
) -> None:
    tracker = make_tracker()
    assert tracker.is_promise_kept(timeline) is None  # no promise is sent yet
    next_forecast(tracker, 0)
    assert tracker.is_promise_kept(timeline) is kept


@pytest.mark.parametrize("first_s", [0.1, 3.0])
def test_promise_sent_with_the_first_token_does_not_count(first_s: float) -> None:
    promises = TtftPromises()
    for _ in range(MIN_ERRORS):
        tracker = make_tracker(promises=promises)
        assert next_forecast(tracker, 1).ttft_s == pytest.approx(1.02)
        assert tracker.is_promise_kept(delivered(first_s)) is None
        tracker.record_answer(delivered(first_s))


def test_forecast_without_ttft_leaves_the_promise() -> None:
    tracker = make_tracker(ttft_s=None)
    next_forecast(tracker, 0)
    tracker.update(SchedulerForecast(QUARTERS, 0.1, 0.5))
    assert tracker.is_promise_kept(delivered(0.9)) is None
    next_forecast(tracker, 0)
    assert (tracker.is_promise_kept(delivered(0.9)), tracker.is_promise_kept(delivered(1.1))) == (
        True,
        False,
    )


def test_later_promises_are_calibrated_by_outcomes() -> None:
    """0.48 s are expected each time. With 20 ms added to both, the error is 0.75 / 0.5 = 1.5."""
    promises, sla = TtftPromises(), Sla("c", 0.8)
    for _ in range(MIN_ERRORS):
        tracker = make_tracker(ttft_s=0.48, sla=sla, promises=promises)
        reported = next_forecast(tracker, 0)
        assert reported.ttft_s == pytest.approx(0.98) and reported.sla_expected is False
        tracker.record_answer(delivered(0.73))
    calibrated = next_forecast(make_tracker(ttft_s=0.48, sla=sla, promises=promises), 0)
    assert calibrated.ttft_s == pytest.approx(0.73) and calibrated.sla_expected is True
    longer = next_forecast(make_tracker(ttft_s=1.98, sla=sla, promises=promises), 0)
    assert longer.ttft_s == pytest.approx(2.98) and longer.sla_expected is False
    assert longer.end_s == pytest.approx(1.98 + 41.5 * 0.1)  # the end is an expectation


def test_only_tested_promises_calibrate() -> None:
    promises = TtftPromises()
    for _ in range(MIN_ERRORS):
        make_tracker(promises=promises).record_answer(delivered(9.0))  # never sent
        tracker = make_tracker(promises=promises)
        next_forecast(tracker, 0)
        tracker.record_answer(delivered(0.1, tokens=0))  # its client disconnected at once
    assert next_forecast(make_tracker(promises=promises), 0).ttft_s == pytest.approx(1.02)


@pytest.mark.parametrize(("token_s", "ttft_s"), [(inf, 0.1), (-1.0, 0.1), (0.1, inf), (0.1, -0.1)])
def test_forecast_tracker_refuses_impossible_times(token_s: float, ttft_s: float) -> None:
    with pytest.raises(ValueError, match="finite and not negative"):
        SchedulerForecast(QUARTERS, token_s, ttft_s)


@given(
    first=forecasts(),
    second=forecasts(),
    most=st.integers(1, 500),
    token_s=st.floats(0, 10),
    ttft_s=st.none() | st.floats(0, 1e4),
    steps=st.lists(st.tuples(st.integers(0, 60), st.floats(0, 5)), max_size=20),
    replaced_at=st.integers(0, 20),
)
def test_forecasts_are_ordered_and_end_at_the_actual_length(
    first: Forecast,
    second: Forecast,
    most: int,
    token_s: float,
    ttft_s: float | None,
    steps: list[tuple[int, float]],
    replaced_at: int,
) -> None:
    tracker = make_tracker(first, token_s, ttft_s, most)
    sent, now_s = 0, 10.0
    for at, (tokens, takes_s) in enumerate(steps):
        if at == replaced_at:
            tracker.update(SchedulerForecast(second, token_s, None))
        sent, now_s = min(most, sent + tokens), now_s + takes_s
        reported = next_forecast(tracker, sent, now_s)
        assert (
            sent <= reported.low_tokens <= reported.expected_tokens <= reported.high_tokens <= most
        )
        assert isfinite(reported.end_s) and reported.end_s >= 0
    assert next_forecast(tracker, sent, now_s, over=True).expected_tokens == sent


@given(forecast=forecasts(), most=st.integers(1, 500))
def test_forecast_lower_bound_never_decreases(forecast: Forecast, most: int) -> None:
    """Each token excludes shorter lengths."""
    tracker = make_tracker(forecast, most=most)
    reported = [next_forecast(tracker, sent) for sent in range(most)]
    lows = [each.low_tokens for each in reported]
    assert lows == sorted(lows)
    assert reported[-1].high_tokens == most
