"""LengthWindow: the start, answers cut at max_tokens, and live answers, by worked examples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core import FinishReason, Outcome, Request
from services.forecast import MAX_POINTS, UNCAPPED, Forecast
from services.lengths import LengthWindow
from services.scheduler.links.fallback import History

CAP = 64


def reported(*answers: int | str, window: int = 1_000, prior: float = 1.0) -> LengthWindow:
    """A window of ended answers; "9+" was cut at its max_tokens of 9."""
    lengths = LengthWindow(window, prior)
    for answer in answers:
        cut = str(answer).endswith("+")
        tokens = int(str(answer).rstrip("+"))
        reason = FinishReason.LENGTH if cut else FinishReason.STOP
        lengths.add(tokens, reason, tokens if cut else CAP)
    return lengths


def table(lengths: LengthWindow) -> dict[float, float]:
    made = lengths.forecast("x")
    return dict(zip(made.points, made.weights, strict=True))


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((), {UNCAPPED: 1.0}),
        ((5,), {5: 1 / 2, UNCAPPED: 1 / 2}),
        ((5, 5, 7), {5: 2 / 4, 7: 1 / 4, UNCAPPED: 1 / 4}),
        # 3 is one of five. The one cut at 5 is shared by the three that are longer, each of which
        # then weighs 4/5 of a third.
        ((3, "5+", 8, 9), {3: 1 / 5, 8: 4 / 15, 9: 4 / 15, UNCAPPED: 4 / 15}),
        # Cut at a length where another ended: it was longer.
        ((4, "4+"), {4: 1 / 3, UNCAPPED: 2 / 3}),
        # All are only known to be longer.
        (("6+", "6+"), {UNCAPPED: 1.0}),
    ],
)
def test_partly_filled_window_matches_worked_examples(
    answers: tuple[int | str, ...], expected: dict[float, float]
) -> None:
    assert table(reported(*answers)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((9, 1, 2, 3), {1: 1 / 3, 2: 1 / 3, 3: 1 / 3}),
        ((9, 1, "2+", 3), {1: 1 / 3, 3: 2 / 3}),
        ((9, 1, 2, "3+"), {1: 1 / 3, 2: 1 / 3, UNCAPPED: 1 / 3}),
    ],
)
def test_full_window_equals_past_future(
    answers: tuple[int | str, ...], expected: dict[float, float]
) -> None:
    assert table(reported(*answers, window=3)) == pytest.approx(expected)


def test_length_end_below_cap_counts_as_ended() -> None:
    lengths = LengthWindow()
    lengths.add(9, FinishReason.LENGTH, 100)  # the context was full
    assert table(lengths) == pytest.approx({9: 0.5, UNCAPPED: 0.5})


def test_cut_answers_do_not_shorten_forecast() -> None:
    """Half of the answers are 200 tokens, and half of the clients cut theirs at 50."""
    lengths = reported(*(10, "10+", 200, "50+") * 100)
    cut = lengths.forecast("x").truncated(1_000)
    naive = Forecast((10.0, 50.0, 200.0), (0.5, 0.25, 0.25), 1_000)
    assert cut.mean() > 1.5 * naive.mean()
    assert cut.survival(50) == pytest.approx(301 / 401)


@pytest.mark.parametrize(
    ("answers", "live", "expected"),
    [
        # Of four answers that reached one token, one ended there; of the two that reached 3, one.
        ((1, 3), (2, 5), {1: 1 / 5, 3: 4 / 15, UNCAPPED: 8 / 15}),
        ((5,), (9, 20, 5), {5: 1 / 5, UNCAPPED: 4 / 5}),
        ((5, "7+"), (6,), {5: 1 / 4, UNCAPPED: 3 / 4}),
        ((5, 7), (4,), {5: 1 / 3, 7: 1 / 3, UNCAPPED: 1 / 3}),  # may end at 5 as well as the others
    ],
)
def test_live_answers_end_longer_than_they_are_now(
    answers: tuple[int | str, ...], live: tuple[int, ...], expected: dict[float, float]
) -> None:
    lengths = reported(*answers)
    assert lengths.observe_live(live)
    assert table(lengths) == pytest.approx(expected)
    assert lengths.observe_live(())
    assert not lengths.observe_live(())
    assert table(lengths) == table(reported(*answers))


def test_live_answers_from_before_the_window_are_not_counted() -> None:
    """A restarted predictor has a full window from the log. The first live answers that it sees may
    have been as long before; one more is an increase."""
    lengths = reported(9, 1, 2, 3, window=3)
    ended = table(lengths)
    lengths.observe_live((5, 5))
    assert table(lengths) == ended
    lengths.observe_live((7, 5, 4))
    assert table(lengths) == pytest.approx({1: 1 / 4, 2: 1 / 4, 3: 1 / 4, UNCAPPED: 1 / 4})


def test_snapshots_of_live_answers_are_bounded() -> None:
    """A window of 100 keeps at most one snapshot for every six answers."""
    lengths = LengthWindow(100)
    for _ in range(400):
        lengths.add(5, FinishReason.STOP, CAP)
        lengths.observe_live((9,) * 30)
    assert len(lengths._snapshots) <= 100 // 6 + 2
    assert table(lengths) == {5: 1.0}  # the live answers of now were as long before


def test_live_answers_without_ended_ones_say_nothing() -> None:
    lengths = LengthWindow()
    lengths.observe_live((5, 9))
    assert table(lengths) == {UNCAPPED: 1.0}


def test_shortest_first_does_not_bias_the_forecast() -> None:
    """Answers have 10 or 100 tokens. All of 10 have ended, of those of 100 not one."""
    lengths = reported(*[10] * 50)
    assert lengths.forecast("x").survival(10) == pytest.approx(1 / 51)
    lengths.observe_live([60] * 50)
    assert lengths.forecast("x").survival(10) == pytest.approx(51 / 101)


class _Request:
    """A request with the number of answers that had ended when it generated each token."""

    def __init__(self, length: int):
        self.length = length
        self.ended_before: list[int] = []


@given(st.data())
def test_window_counts_the_answers_that_reached_a_length_within_it(data: st.DataObject) -> None:
    """Requests generate tokens in any order; of those that reached a length since the window began,
    the share that ended there is the forecast's. Long answers that began before the window never
    make the forecast shorter than the ended answers do."""
    window = data.draw(st.integers(1, 12))
    lengths = LengthWindow(window, prior=0)
    requests = [_Request(data.draw(st.integers(1, 6))) for _ in range(24)]
    ended: list[_Request] = []
    live = list(requests)
    for _ in range(data.draw(st.integers(10, 60))):
        if not live:
            break
        request = data.draw(st.sampled_from(live))
        request.ended_before.append(len(ended))
        if len(request.ended_before) == request.length:
            live.remove(request)
            ended.append(request)
            lengths.add(request.length, FinishReason.STOP, CAP)
        lengths.observe_live([n for each in live if (n := len(each.ended_before))])
    if not ended:
        return
    begin = max(0, len(ended) - window)
    left = 1.0
    expected: dict[float, float] = {}
    for length in sorted({each.length for each in ended[begin:]}):
        reached = sum(
            len(each.ended_before) >= length and each.ended_before[length - 1] >= begin
            for each in requests
        )
        reached = max(reached, sum(each.length >= length for each in ended[begin:]))
        ends = sum(each.length == length for each in ended[begin:])
        expected[length] = left * ends / reached
        left *= 1 - ends / reached
    if left > 1e-12:
        expected[UNCAPPED] = left
    assert table(lengths) == pytest.approx(expected)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=400), st.integers(1, 400))
def test_many_lengths_are_merged_but_cap_mass_is_not(lengths: list[int], window: int) -> None:
    made = reported(*lengths, window=window).forecast("x")
    kept = lengths[-window:]
    room = len(kept) < window
    assert len(made.points) <= MAX_POINTS and sum(made.weights) == pytest.approx(1)
    assert (made.points[-1] == UNCAPPED) is room
    ended = made.points[:-1] if room else made.points
    assert max(ended) <= max(kept)
    if room:
        assert made.weights[-1] == pytest.approx(1 / (len(kept) + 1))
    expected = np.mean([*kept, 300] if room else kept)
    assert made.truncated(300).mean() == pytest.approx(expected, abs=0.01)


def test_forecast_is_cached_until_next_answer() -> None:
    lengths = reported(5)
    first = lengths.forecast("x")
    assert lengths.forecast("x") is first
    lengths.add(6, FinishReason.STOP, CAP)
    assert lengths.forecast("x").points == (5, 6, UNCAPPED)


def test_fallback_history_starts_with_max_tokens() -> None:
    def ended(tokens: int, reason: FinishReason, most: int = 99) -> Outcome:
        return Outcome("r", "demo", "", 12, tokens, most, reason, 1.0, 0)

    history = History()
    asked = Request("r", "demo", 12, 40, 0.0)
    assert history.forecast(asked) == Forecast((40.0,), (1.0,), 40, "fallback")
    history.learn(ended(3, FinishReason.CANCELLED))
    history.learn(ended(0, FinishReason.STOP))
    history.learn(ended(5, FinishReason.STOP))
    assert history.forecast(asked) == Forecast((5.0, 40.0), (0.5, 0.5), 40, "fallback")
    history.learn(ended(20, FinishReason.LENGTH, 20))
    made = history.forecast(asked)
    assert made.points == (5, 40) and made.weights == pytest.approx((1 / 3, 2 / 3))
