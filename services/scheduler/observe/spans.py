"""Spans of traced requests, from the transitions of the state.

A `queue` span lasts from a request's arrival, or from its preemption, until it is admitted. A
`forecast` span lasts from the question until the first answer. Without traced requests a step costs
one dictionary lookup.
"""

from dataclasses import dataclass
from math import inf

from observability.tracing import NO_SPAN, REQUEST_ID, Span, Spans, Value
from services.forecast import Forecast
from services.runtime.bounded_dict import BoundedDict
from services.scheduler.core import events as ev
from services.scheduler.core.phases import RequestPhase, Transition, TransitionCause

MAX_TRACED = 16_384  # the oldest is dropped
WHY, END = "foretoken.queue.reason", "foretoken.queue.end"


@dataclass(slots=True)
class _Traced:
    parent: str
    waits_since_s: float  # infinite while it runs
    max_tokens: int = 0  # known once its forecast is asked for
    min_tokens: int = 0
    why: str = "arrival"
    forecast: Span = NO_SPAN


class SchedulerSpans:
    """Observes each step of the state, before its actions are carried out."""

    def __init__(self, spans: Spans):
        self._spans = spans
        self._traced = BoundedDict[str, _Traced](MAX_TRACED)

    def submitted(self, request_id: str, parent: str, now: float) -> None:
        """Traces a request under `parent`. A request that is traced already is left as it is."""
        if parent and self._spans.on and request_id not in self._traced:
            self._traced[request_id] = _Traced(parent, now)

    def forecast_parent(self, request_id: str) -> str:
        """The parent of the predictor's spans while its answer is pending; empty if untraced."""
        traced = self._traced.get(request_id)
        return traced.forecast.traceparent if traced else ""

    def observe(self, step: ev.Step) -> None:
        """O(actions + transitions)."""
        if not self._traced:
            return
        if isinstance(step.event, ev.Forecasted):
            for request_id, forecast in step.event.forecasts:
                self._forecasted(request_id, forecast, step.now)
        for action in step.actions:
            if isinstance(action, ev.AskForecast):
                self._ask_forecast(action, step.now)
        for transition in step.transitions:
            self._changed(transition)

    def _ask_forecast(self, action: ev.AskForecast, now: float) -> None:
        for request in action.requests:
            if traced := self._traced.get(request.request_id):
                traced.forecast.end(now)  # submitted again: the first question is over
                attributes = {REQUEST_ID: request.request_id}
                traced.max_tokens = request.max_tokens
                traced.min_tokens = request.min_tokens
                traced.forecast = self._spans.begin("forecast", traced.parent, now, attributes)

    def _forecasted(self, request_id: str, forecast: Forecast, now: float) -> None:
        traced = self._traced.get(request_id)
        if traced is None or traced.forecast is NO_SPAN:
            return
        mean = forecast.at_least(traced.min_tokens).mean(0, traced.max_tokens)
        traced.forecast.put(
            {
                "foretoken.forecast.source": forecast.source,
                "foretoken.forecast.mean_tokens": float(mean),
            }
        )
        traced.forecast.end(now)
        traced.forecast = NO_SPAN

    def _changed(self, t: Transition) -> None:
        traced = self._traced.get(t.request_id)
        if traced is None:
            return
        match t.cause:
            case TransitionCause.PLACED:
                self._end_queue(t, {END: "placed", "foretoken.worker": t.worker_id})
            case _ if t.resumes:
                self._end_queue(t, {END: "resumed", "foretoken.queue.held_tokens": t.held_tokens})
            case _ if t.interrupts:
                traced.waits_since_s, traced.why = min(t.at_s, traced.waits_since_s), "preempted"
            case TransitionCause.SUPERSEDED:
                pass  # the new submission continues the trace
            case _ if t.after is RequestPhase.NONE:
                self._end_queue(t, {END: str(t.reason)})
                traced.forecast.end(t.at_s)
                del self._traced[t.request_id]

    def _end_queue(self, t: Transition, attributes: dict[str, Value]) -> None:
        traced = self._traced[t.request_id]
        if traced.waits_since_s == inf:
            return
        attributes |= {REQUEST_ID: t.request_id, WHY: traced.why}
        self._spans.record("queue", traced.parent, traced.waits_since_s, t.at_s, attributes)
        traced.waits_since_s = inf
