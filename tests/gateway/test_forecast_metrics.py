"""Forecasts sent to clients, compared with outcomes: counted once per choice."""

from math import inf

import pytest
from prometheus_client import CollectorRegistry

from gateway.metrics import Metrics
from gateway.sessions.forecast_tracker import ForecastTracker
from gateway.sessions.ttft_promises import TtftPromises
from gateway.types.forecasts import SchedulerForecast
from gateway.types.outcome import ChoiceOutcome
from observability.metrics.gateway import CLIENT_FORECASTS, SLA_FORECASTS, TTFT_PROMISES
from services.core import FinishReason, Sla
from services.forecast import UNCAPPED, Forecast
from services.sla import RequestTimeline

STOP, CANCELLED = FinishReason.STOP, FinishReason.CANCELLED
HALVES = Forecast((10.0, 20.0), (0.5, 0.5), UNCAPPED)
FAMILIES = [f"{each.family}" for each in (CLIENT_FORECASTS, TTFT_PROMISES, SLA_FORECASTS)]


def count_outcome(
    tokens: int, first_s: float, sla: Sla, reason: FinishReason = STOP, sent_at: int | None = 0
) -> dict[str, float]:
    """The counters, by labels, after a choice that arrives at 0 and ends after `tokens` tokens, the
    first of them at `first_s`. The scheduler expects the first token at 0.5 s, so that the promise
    is 1.02 s. The forecast is sent when `sent_at` tokens were sent; None: never."""
    registry = CollectorRegistry()
    tracker = ForecastTracker(sla, 100, 0.0, TtftPromises())
    tracker.update(SchedulerForecast(HALVES, 0.1, 0.5))
    if sent_at is not None:
        tracker.next_chunk(sent_at, False, 0.1)
    timeline = RequestTimeline(0.0, placed_s=0.0)
    if tokens:
        timeline.on_tokens(1, first_s)
        timeline.on_tokens(tokens - 1, first_s + 1.0)
    timeline.ended_s = first_s + 1.0
    outcome, metrics = ChoiceOutcome.judged(sla, timeline, reason), Metrics(registry)
    if tracker.opening is not None:
        kept = tracker.is_promise_kept(timeline)
        metrics.on_forecast_outcome(tracker.opening, kept, outcome)
    return {
        " ".join(f"{name}={value}" for name, value in sample.labels.items()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name in FAMILIES
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
    assert count_outcome(tokens, first_s, Sla("c", budget_s)) == {
        f"covered={covered}": 1.0,
        f"kept={kept}": 1.0,
        f"foreseen={foreseen} outcome={outcome}": 1.0,
    }


@pytest.mark.parametrize(
    ("tokens", "first_s", "sla", "reason", "sent_at", "counts"),
    [
        pytest.param(15, 0.5, Sla("c", inf), CANCELLED, 0, ("kept=yes",), id="client disconnects"),
        pytest.param(
            0, 5.0, Sla("c", 2.0), FinishReason.DEADLINE, 0,
            ("kept=no", "foreseen=held outcome=missed"), id="no tokens",
        ),
        pytest.param(
            0, 0.01, Sla("c", 2.0), FinishReason.DEADLINE, 0,
            ("foreseen=held outcome=missed",), id="ends at 1.01 s, before the promise",
        ),
        pytest.param(
            10, 0.1, Sla("c", 2.0), STOP, 1,
            ("covered=yes", "foreseen=held outcome=met"), id="promise sent with the first token",
        ),
        pytest.param(15, 0.5, Sla(), STOP, None, (), id="no forecast"),
    ],
)  # fmt: skip
def test_uncertain_parts_of_a_forecast_are_not_counted(
    tokens: int, first_s: float, sla: Sla, reason: FinishReason, sent_at: int | None,
    counts: tuple[str, ...],
) -> None:  # fmt: skip
    assert count_outcome(tokens, first_s, sla, reason, sent_at) == dict.fromkeys(counts, 1.0)
