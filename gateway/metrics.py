"""The gateway's Prometheus metrics: requests as their clients see them."""

from collections.abc import Callable, Mapping
from math import inf

from prometheus_client import CollectorRegistry

from gateway.types.errors import RefusalReason
from gateway.types.forecasts import ClientForecast
from gateway.types.outcome import ChoiceOutcome, ResubmitCause
from gateway.types.sla_classes import OTHER
from observability.metrics import gateway as catalogue
from observability.metrics.instruments import Instruments, ReadValue
from services.core import FinishReason, Sla
from services.runtime.telemetry.invalid_messages import InvalidMessages
from services.sla import SlaMissCause

REJECTED = "rejected"
MET, MISSED = "met", "missed"
COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)  # the final length of others is unknown


class Metrics:
    """All instruments of one gateway in one registry. What the event loop updates per token or
    request uses instruments without locks."""

    def __init__(self, registry: CollectorRegistry, slas: Mapping[str, Sla] | None = None):
        """`slas`: the classes that a request can name; only these become labels."""
        make = Instruments(registry)
        self.registry = registry
        self.invalid = InvalidMessages(registry, catalogue.INVALID_MESSAGES, "Stream", "Submit")
        self.gaps = make.lean_histogram(catalogue.GAP).labels()
        self.prompt_tokens = make.counter(catalogue.PROMPT_TOKENS)
        self.generation_tokens = make.counter(catalogue.GENERATION_TOKENS)
        self.resubmissions = make.counter(catalogue.RESUBMISSIONS)
        self.announcements = make.counter(catalogue.ANNOUNCEMENTS)
        self.refusals = make.counter(catalogue.REFUSALS)
        self.peers_missing = make.gauge(catalogue.PEERS_MISSING)
        self._slas = slas or {}
        self._running = make.gauge(catalogue.RUNNING)
        self._waiting = make.gauge(catalogue.WAITING)
        self._ttft = make.lean_histogram(catalogue.TTFT)
        self._first_content = make.lean_histogram(catalogue.FIRST_CONTENT).labels()
        self._tpot = make.lean_histogram(catalogue.TPOT)
        self._mtpot = make.lean_histogram(catalogue.MTPOT)
        self._e2e = make.lean_histogram(catalogue.E2E)
        self._queue = make.lean_histogram(catalogue.QUEUE).labels()
        self._prefill = make.lean_histogram(catalogue.PREFILL).labels()
        self._decode = make.lean_histogram(catalogue.DECODE).labels()
        self._success = make.counter(catalogue.SUCCESS)
        self._sla = make.counter(catalogue.SLA)
        self._goodput_tokens = make.counter(catalogue.GOODPUT_TOKENS)
        self._forecasts = make.counter(catalogue.CLIENT_FORECASTS)
        self._ttft_promises = make.counter(catalogue.TTFT_PROMISES)
        self._sla_forecasts = make.counter(catalogue.SLA_FORECASTS)
        self._create_series()

    def _create_series(self) -> None:
        """Creates labelled series at 0, so that Prometheus sees the first event as an increase."""
        for reason in (*(reason.value for reason in FinishReason), REJECTED):
            self._success.labels(reason)
        for name in (*self._slas, OTHER):
            self._goodput_tokens.labels(name)
            for by_class in (self._ttft, self._tpot, self._mtpot, self._e2e):
                by_class.labels(name)
            for miss_cause in SlaMissCause:
                self._sla.labels(name, MISSED if miss_cause else MET, miss_cause.value)
        for resubmit_cause in ResubmitCause:
            self.resubmissions.labels(resubmit_cause.value)
        for refusal in RefusalReason:
            self.refusals.labels(refusal.value)

    def watch(
        self, running: Callable[[], int], waiting: Callable[[], int], adapters: ReadValue
    ) -> None:
        """Sets the functions that the gauges call at each scrape. Called once."""
        self._running.set_function(running)
        self._waiting.set_function(waiting)
        Instruments(self.registry).reading(catalogue.ADAPTERS, adapters)

    def watch_limits(self, shared: Callable[[], bool | None]) -> None:
        """Sets the function that says whether limits of keys are shared. Called once."""
        Instruments(self.registry).reading(catalogue.LIMITS_SHARED, shared)

    def class_label(self, name: str) -> str:
        """`name` if it is a configured class, else OTHER: clients cannot create labels."""
        return name if name in self._slas else OTHER

    def on_refused(self, reason: RefusalReason, name: str, choices: int) -> None:
        """Choices of a class were refused before admission."""
        self.refusals.labels(reason.value).inc()
        self._sla.labels(name, MISSED, SlaMissCause.REJECTED.value).inc(choices)

    def on_delivered(self, outcome: ChoiceOutcome) -> None:
        """The delivery of a choice is complete."""
        timeline, cause = outcome.timeline, outcome.cause
        name = self.class_label(outcome.sla.name)
        self._success.labels(REJECTED if timeline.rejected else outcome.reason.value).inc()
        self._sla.labels(name, MISSED if cause else MET, cause.value).inc()
        if not cause:
            self._goodput_tokens.labels(name).inc(timeline.tokens)
        if timeline.rejected:
            return
        self._e2e.labels(name).observe(timeline.ended_s - timeline.arrival_s)
        self._queue.observe(timeline.queued_s)
        if timeline.tokens:
            self._ttft.labels(name).observe(timeline.ttft_s)
            self._decode.observe(timeline.decode_s)
            if timeline.placed_s < inf:
                self._prefill.observe(timeline.first_token_s - timeline.placed_s)
        if timeline.tokens > 1:
            self._tpot.labels(name).observe(timeline.tpot_s)
            self._mtpot.labels(name).observe(timeline.longest_gap_s)

    def on_content(self, first_s: float) -> None:
        """A choice with content is delivered; the first came `first_s` after the arrival."""
        self._first_content.observe(first_s)

    def on_forecast_outcome(
        self, opening: ClientForecast, promise_kept: bool | None, outcome: ChoiceOutcome
    ) -> None:
        """The delivery of a choice is complete; `opening` is the first forecast sent before its
        end. `promise_kept` is None if no promise counts."""
        if outcome.reason in COMPLETE:
            covered = opening.low_tokens <= outcome.timeline.tokens <= opening.high_tokens
            self._forecasts.labels(_yes_no(covered)).inc()
        if promise_kept is not None:
            self._ttft_promises.labels(_yes_no(promise_kept)).inc()
        if opening.sla_expected is not None and outcome.cause is not SlaMissCause.CLIENT:
            expected = "held" if opening.sla_expected else "broken"
            self._sla_forecasts.labels(expected, MISSED if outcome.cause else MET).inc()


def _yes_no(value: bool) -> str:
    return "yes" if value else "no"
