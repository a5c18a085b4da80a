"""What happened here to traced requests, as spans: from the state's events and actions.

A `queue` lasts from a request's arrival, or from when it had to stop, until it may run; a
`forecast` from the question until the first answer, whoever gives it. The state knows nothing of
this. Costs a look at a dict where nobody is traced.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from observability.tracing import NO_SPAN, REQUEST_ID, Span, Spans, Value
from services.forecast import Forecast
from services.scheduler.core import events as ev

MOST_TRACED = 16_384  # the oldest makes room
WHY, END = "foretoken.queue.reason", "foretoken.queue.end"


@dataclass(slots=True)
class _Traced:
    parent: str
    waits_since_s: float  # infinite while it may run
    cap: int = 0  # its max_tokens, once its forecast is asked for
    why: str = "arrival"
    forecast: Span = NO_SPAN


class SchedulerSpans:
    """Told of each step of the state, before its actions are carried out."""

    def __init__(self, spans: Spans):
        self._spans = spans
        self._traced: OrderedDict[str, _Traced] = OrderedDict()
        self._handlers: dict[str, Callable[[Any, float], None]] = {
            "ask_forecast": self._ask_forecast,
            "place": self._place,
            "preempt": self._preempt,
            "resume": self._resume,
            "finish": self._finish,
            "refuse": self._refuse,
        }

    def submitted(self, request_id: str, parent: str, now: float) -> None:
        """It has come, traced under `parent`. Told of again, it goes on as it was."""
        if parent and self._spans.on and request_id not in self._traced:
            self._traced[request_id] = _Traced(parent, now)
            if len(self._traced) > MOST_TRACED:
                self._traced.popitem(last=False)

    def forecast_parent(self, request_id: str) -> str:
        """What the predictor's part is traced under, while its answer is awaited."""
        traced = self._traced.get(request_id)
        return traced.forecast.traceparent if traced else ""

    def tell(
        self, event: ev.Event, now: float, actions: Sequence[ev.Action], live: Collection[str]
    ) -> None:
        """`live`: the requests that are here after it. O(actions)."""
        if not self._traced:
            return
        if isinstance(event, ev.Forecasted):
            for request_id, forecast in event.forecasts:
                self._forecasted(request_id, forecast, now)
        for action in actions:
            if handle := self._handlers.get(action.kind):
                handle(action, now)
        if isinstance(event, ev.Cancelled):
            self._leave(event.request_id, event.reason.value, now)
        elif isinstance(event, ev.GatewayLost):
            for request_id in [name for name in self._traced if name not in live]:
                self._leave(request_id, "gateway_lost", now)

    def _ask_forecast(self, action: ev.AskForecast, now: float) -> None:
        for request in action.requests:
            if traced := self._traced.get(request.request_id):
                traced.forecast.end(now)  # asked for again: the first question is over
                about = {REQUEST_ID: request.request_id}
                traced.cap = request.max_tokens
                traced.forecast = self._spans.begin("forecast", traced.parent, now, about)

    def _forecasted(self, request_id: str, forecast: Forecast, now: float) -> None:
        traced = self._traced.get(request_id)
        if traced is None or traced.forecast is NO_SPAN:
            return
        traced.forecast.put(
            {
                "foretoken.forecast.source": forecast.source,
                "foretoken.forecast.mean_tokens": float(forecast.mean(0, traced.cap)),
            }
        )
        traced.forecast.end(now)
        traced.forecast = NO_SPAN

    def _place(self, action: ev.Place, now: float) -> None:
        self._runs(action.request_id, {END: "placed", "foretoken.worker": action.worker_id}, now)

    def _resume(self, action: ev.Resume, now: float) -> None:
        about: dict[str, Value] = {
            END: "resumed",
            "foretoken.queue.held_tokens": action.held_tokens,
        }
        self._runs(action.request_id, about, now)

    def _preempt(self, action: ev.Preempt, now: float) -> None:
        if traced := self._traced.get(action.request_id):
            traced.waits_since_s, traced.why = min(now, traced.waits_since_s), "preempted"

    def _finish(self, action: ev.Finish, now: float) -> None:
        self._leave(action.request_id, action.reason.value, now)

    def _refuse(self, action: ev.Refuse, now: float) -> None:
        self._leave(action.request_id, action.reject.reason.value, now)

    def _runs(self, request_id: str, about: dict[str, Value], now: float) -> None:
        traced = self._traced.get(request_id)
        if traced is None or traced.waits_since_s == inf:
            return
        about |= {REQUEST_ID: request_id, WHY: traced.why}
        self._spans.record("queue", traced.parent, traced.waits_since_s, now, about)
        traced.waits_since_s = inf

    def _leave(self, request_id: str, why: str, now: float) -> None:
        """It is here no more; where it waited still, that ends so."""
        self._runs(request_id, {END: why}, now)
        if traced := self._traced.pop(request_id, None):
            traced.forecast.end(now)
