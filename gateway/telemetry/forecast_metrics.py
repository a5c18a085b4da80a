"""Accuracy of the forecasts sent to clients, counted once per delivered choice."""

from prometheus_client import CollectorRegistry

from gateway.types.forecasts import ClientForecast
from gateway.types.outcome import ChoiceOutcome
from observability.metrics.gateway import FORECAST_TOLD, PROMISED_TTFT, SLA_FORESEEN
from observability.metrics.instruments import Instruments
from services.core import FinishReason
from services.sla import SlaMissCause

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)  # the final length of others is unknown


class ForecastMetrics:
    """Counts only forecasts sent before the end, and the first promise of each choice."""

    def __init__(self, registry: CollectorRegistry):
        instruments = Instruments(registry)
        self._covered = instruments.counter(FORECAST_TOLD)
        self._kept = instruments.counter(PROMISED_TTFT)
        self._sla = instruments.counter(SLA_FORESEEN)

    def on_delivered(
        self, opening: ClientForecast, promise_kept: bool | None, outcome: ChoiceOutcome
    ) -> None:
        """The delivery of a choice is complete; `opening` is its first forecast."""
        if outcome.reason in COMPLETE:
            covered = opening.low_tokens <= outcome.timeline.tokens <= opening.high_tokens
            self._covered.labels(_yes_no(covered)).inc()
        if promise_kept is not None:
            self._kept.labels(_yes_no(promise_kept)).inc()
        if opening.sla_expected is not None and outcome.cause is not SlaMissCause.CLIENT:
            expected = "held" if opening.sla_expected else "broken"
            self._sla.labels(expected, "missed" if outcome.cause else "met").inc()


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
