"""Forecasts from words, and the thread that makes them."""

import time
from collections.abc import Callable, Sequence

from foretoken.vllm.learner import Learner
from foretoken.vllm.lengths import Asked, LengthLearner, MaxTokens
from services.core import FinishReason, Outcome, Request
from services.costs import StepTiming
from services.scheduler.core.events import Forecasted

SHORT, LONG = 20, 400


def asked(name: str, words: str) -> Asked:
    """A prompt with its letters as token ids."""
    return Asked(Request(name, "demo", len(words), 1_000, 0.0), [ord(letter) for letter in words])


def decode(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def outcome(name: str, tokens: int) -> Outcome:
    return Outcome(name, "demo", "", 10, tokens, 1_000, FinishReason.STOP, 1.0, 0)


def taught(learner: LengthLearner, answers: int = 200) -> None:
    for number in range(answers):
        name, long = f"r{number}", number % 2
        learner.forecast([asked(name, f"{'explain' if long else 'spell'} the word {number}")])
        learner.learn([outcome(name, (LONG if long else SHORT) + number % 7)])
    learner.refit(now=0.0)


def mean(learner: LengthLearner, words: str) -> float:
    [(_, forecast)] = learner.forecast([asked("new", words)])
    return forecast.mean(0, 1_000)


def test_words_tell_long_answers_from_short_ones() -> None:
    learner = LengthLearner(decode)
    before = mean(learner, "explain the word cat")
    assert before == 1_000  # nothing is known but max_tokens
    taught(learner)
    assert mean(learner, "spell the word cat") < 100
    assert mean(learner, "explain the word cat") > 300


def test_without_a_tokenizer_recent_lengths_forecast() -> None:
    learner = LengthLearner(None)
    taught(learner)
    forecast = mean(learner, "explain the word cat")
    assert abs(forecast - (SHORT + LONG) / 2) < 20


def test_requests_that_were_cut_short_are_not_learned_from() -> None:
    learner = LengthLearner(None)
    cut = Outcome("r", "demo", "", 10, 3, 1_000, FinishReason.CANCELLED, 1.0, 0)
    learner.learn([cut])
    assert mean(learner, "explain the word cat") == 1_000


def until(condition: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_thread_forecasts_and_fits_step_times_without_being_waited_for() -> None:
    learner = Learner(MaxTokens())
    learner.start()
    try:
        learner.ask(asked("a", "spell cat"))
        forecasts: list[str] = []

        def forecast() -> list[str]:
            for news in learner.pop_news():
                assert isinstance(news, Forecasted)
                forecasts.extend(name for name, _ in news.forecasts)
            return forecasts

        until(forecast)
        assert forecasts == ["a"]
        for tokens in range(1, 200):
            seqs, context = tokens % 9, tokens * 13 % 500
            step_s = 0.01 + 0.001 * tokens + 0.0005 * seqs + 1e-5 * context
            learner.timed(StepTiming(tokens, seqs, context, step_s))
        costs: list[float] = []

        def cost() -> list[float]:
            if found := learner.pop_cost():
                costs.append(found.base_s)
            return costs

        until(cost)
        assert abs(costs[0] - 0.01) < 0.001
    finally:
        learner.stop()
