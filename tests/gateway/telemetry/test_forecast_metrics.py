"""How what was told came true, counted once."""

from math import inf

import pytest
from prometheus_client import CollectorRegistry

from gateway.sessions.forecast_tracker import ForecastTracker
from gateway.sessions.ttft_promises import TtftPromises
from gateway.telemetry.forecast_metrics import ForecastMetrics
from gateway.types.forecasts import SchedulerForecast
from gateway.types.outcome import ChoiceOutcome
from services.core import FinishReason, Sla
from services.forecast import UNCAPPED, Forecast
from services.sla import RequestTimeline

STOP, CANCELLED = FinishReason.STOP, FinishReason.CANCELLED
HALVES = Forecast((10.0, 20.0), (0.5, 0.5), UNCAPPED)


def counted(
    tokens: int, first_s: float, sla: Sla, reason: FinishReason = STOP, told_at: int | None = 0
) -> dict[str, float]:
    """Of one that arrived at 0 and was told 0.5 s, so promised its first token by 1.02 s: what is
    counted, by labels, when it ends after `tokens`, the first of which came at `first_s`."""
    registry = CollectorRegistry()
    sight = ForecastTracker(sla, 100, 0.0, TtftPromises())
    sight.update(SchedulerForecast(HALVES, 0.1, 0.5))
    if told_at is not None:
        sight.next_chunk(told_at, False, 0.1)
    line = RequestTimeline(0.0, placed_s=0.0)
    if tokens:
        line.on_tokens(1, first_s)
        line.on_tokens(tokens - 1, first_s + 1.0)
    line.ended_s = first_s + 1.0
    outcome, metrics = ChoiceOutcome.judged(sla, line, reason), ForecastMetrics(registry)
    if sight.opening is not None:
        metrics.on_delivered(sight.opening, sight.is_promise_kept(line), outcome)
    return {
        " ".join(f"{name}={of}" for name, of in sample.labels.items()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


@pytest.mark.parametrize(
    ("tokens", "first_s", "budget_s", "expected"),
    [
        (10, 1.0, 2.0, ("yes", "yes", "held", "met")),
        (20, 1.1, 2.0, ("yes", "no", "held", "met")),
        (9, 3.0, 2.0, ("no", "no", "held", "missed")),
        (21, 0.5, 0.9, ("no", "yes", "broken", "met")),
        (15, 1.5, 0.9, ("yes", "no", "broken", "missed")),
    ],
)
def test_first_forecast_is_compared_with_the_outcome(
    tokens: int, first_s: float, budget_s: float, expected: tuple[str, ...]
) -> None:
    covered, kept, foreseen, outcome = expected
    assert counted(tokens, first_s, Sla("c", budget_s)) == {
        f"covered={covered}": 1.0,
        f"kept={kept}": 1.0,
        f"foreseen={foreseen} outcome={outcome}": 1.0,
    }


def test_disconnected_client_counts_for_neither_length_nor_sla() -> None:
    assert counted(15, 0.5, Sla("c", inf), CANCELLED) == {"kept=yes": 1.0}


def test_answer_without_tokens_breaks_sla_and_promise() -> None:
    assert counted(0, 5.0, Sla("c", 2.0), FinishReason.DEADLINE) == {
        "kept=no": 1.0,
        "foreseen=held outcome=missed": 1.0,
    }


def test_promise_is_not_counted_if_the_choice_ended_before_it() -> None:
    """It ended after 1.01 s."""
    assert counted(0, 0.01, Sla("c", 2.0), FinishReason.DEADLINE) == {
        "foreseen=held outcome=missed": 1.0
    }


def test_promise_sent_with_the_first_token_is_not_counted() -> None:
    assert counted(10, 0.1, Sla("c", 2.0), told_at=1) == {
        "covered=yes": 1.0,
        "foreseen=held outcome=met": 1.0,
    }


def test_choice_without_forecast_is_not_counted() -> None:
    assert counted(15, 0.5, Sla(), told_at=None) == {}
