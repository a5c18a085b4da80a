"""Forecasts are compared with their outcomes, whatever makes them."""

from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry

from foretoken.vllm.lengths import Asked, Lengths
from foretoken.vllm.metrics.scored_lengths import SCORES_S, ScoredLengths
from services.core import FinishReason, Outcome, Request
from services.forecast import Forecast
from services.predictor.metrics import AccuracyMetrics

FIFTY_FIFTY = Forecast((10.0, 30.0), (0.5, 0.5), 100, "coin")  # mean 20


class Coin(Lengths):
    """Expects 10 or 30 tokens of each request."""

    def forecast(self, asked: Sequence[Asked]) -> list[tuple[str, Forecast]]:
        return [(each.request.request_id, FIFTY_FIFTY) for each in asked]


def outcome(name: str, tokens: int, reason: FinishReason = FinishReason.STOP) -> Outcome:
    return Outcome(name, "demo", "", 5, tokens, 100, reason, 1.0, 0)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def scored(registry: CollectorRegistry) -> ScoredLengths:
    return ScoredLengths(Coin(), AccuracyMetrics(registry))


def test_error_and_coverage(registry: CollectorRegistry, scored: ScoredLengths) -> None:
    names = ["a", "b", "c", "d", "cut", "live"]
    scored.forecast([Asked(Request(name, "demo", 5, 100, 0.0), ()) for name in names])
    # Relative errors of the mean: 1, 1/3, 0 and 3/4. Three of four lie in [10, 30].
    scored.learn([outcome("a", 10), outcome("b", 30), outcome("c", 20), outcome("d", 80)])
    scored.learn([outcome("cut", 3, FinishReason.CANCELLED), outcome("unknown", 7)])
    scored.refit(0.0)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"foretoken_predictor_{name}", labels)

    assert value("forecasts_total", source="coin") == 6
    assert value("outcomes_total", learnt="yes") == 5
    assert value("outcomes_total", learnt="no") == 1
    assert value("scored") == 4
    assert value("relative_error_count", source="coin") == 4
    assert value("relative_error_sum", source="coin") == pytest.approx(1 + 1 / 3 + 0 + 3 / 4)
    assert value("coverage", interval="90") == 0.75


def test_scores_are_summarised_now_and_then(
    registry: CollectorRegistry, scored: ScoredLengths
) -> None:
    scored.forecast([Asked(Request(name, "demo", 5, 100, 0.0), ()) for name in ("a", "b")])
    shown: list[float | None] = []
    for name, at_s in (("a", 0.0), ("b", 0.5 * SCORES_S), ("none", SCORES_S)):
        scored.learn([outcome(name, 10)])
        scored.refit(at_s)
        shown.append(registry.get_sample_value("foretoken_predictor_scored"))
    assert shown == [1, 1, 2]


def test_forgotten_request_is_not_compared(
    registry: CollectorRegistry, scored: ScoredLengths
) -> None:
    scored.forecast([Asked(Request(name, "demo", 5, 100, 0.0), ()) for name in ("a", "b")])
    scored.forget(["a", "unknown"])
    scored.learn([outcome("a", 10), outcome("b", 10)])
    scored.refit(0.0)
    assert registry.get_sample_value("foretoken_predictor_scored") == 1
