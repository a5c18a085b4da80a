"""How what clients were told to expect came true, counted once a choice that asked, at its end."""

from prometheus_client import CollectorRegistry

from gateway.sessions.delivery import Ended
from gateway.sessions.foresight import Foresight
from observability.metrics.gateway import FORECAST_TOLD, PROMISED_TTFT, SLA_FORESEEN
from observability.metrics.instruments import Instruments
from services.core import FinishReason
from services.sla import SlaMissCause

WHOLE = (FinishReason.STOP, FinishReason.LENGTH)  # how long others would have been nobody knows


class ForecastMetrics:
    """Only what was told before the end counts; of promises the first."""

    def __init__(self, registry: CollectorRegistry):
        instruments = Instruments(registry)
        self._covered = instruments.counter(FORECAST_TOLD)
        self._kept = instruments.counter(PROMISED_TTFT)
        self._foreseen = instruments.counter(SLA_FORESEEN)

    def on_settled(self, foresight: Foresight, ended: Ended) -> None:
        """A choice is over, and its client has all of it that it will ever have."""
        opening = foresight.opening
        if opening is None:
            return
        if ended.reason in WHOLE:
            covered = opening.low_tokens <= ended.line.tokens <= opening.high_tokens
            self._covered.labels(_yes(covered)).inc()
        if (kept := foresight.kept(ended.line)) is not None:
            self._kept.labels(_yes(kept)).inc()
        if opening.sla_expected is not None and ended.cause is not SlaMissCause.CLIENT:
            foreseen = "held" if opening.sla_expected else "broken"
            self._foreseen.labels(foreseen, "missed" if ended.cause else "met").inc()


def _yes(true: bool) -> str:
    return "yes" if true else "no"
