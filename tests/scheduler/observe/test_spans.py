"""Queue and forecast spans of traced requests, with a real state."""

import pytest

from observability.tracing import NO_SPANS
from services.core import Completion, FinishReason, Report, RequestProgress
from services.forecast import certain
from services.scheduler.core import events as ev
from services.scheduler.observe.spans import MAX_TRACED, SchedulerSpans
from tests.observability.tracing.otlp import WrittenSpans
from tests.scheduler.state_driver import G, request, state, worker


class Traced:
    """A state with spans that observe its steps, as in the service."""

    def __init__(self) -> None:
        self.state = state()
        self.written = WrittenSpans()
        self.spans = SchedulerSpans(self.written)

    def step(self, event: ev.Event, now: float) -> list[str]:
        actions = self.state.step(event, now)
        self.spans.observe(self.state.last_step)
        return [type(action).__name__ for action in actions]

    def submit(self, name: str, now: float, parent: str = "p", **asked: int) -> list[str]:
        self.spans.submitted(name, parent, now)
        return self.step(ev.Submitted(G, request(name, at=now, **asked)), now)

    def send_forecast(self, name: str, now: float) -> None:
        self.step(ev.Forecasted(((name, certain(20)),)), now)

    @property
    def queues(self) -> list[tuple[float, float | None, str, str]]:
        return [
            (
                span.start_s,
                span.end_s,
                span.attributes["foretoken.queue.reason"],
                span.attributes["foretoken.queue.end"],
            )
            for span in self.written.all
            if span.name == "queue"
        ]


def test_queue_and_forecast_spans_of_request():
    traced = Traced()
    assert traced.submit("a", 1.0) == ["AskForecast"]
    assert traced.spans.forecast_parent("a") == "#0"
    traced.send_forecast("a", 1.5)
    assert traced.spans.forecast_parent("a") == ""  # later questions are not part of it
    traced.send_forecast("a", 1.75)  # a better forecast changes nothing
    traced.step(worker(), 3.0)
    assert "Place" in traced.step(ev.Round(), 3.0)
    evicted = Report(1, 1, evicted=(RequestProgress("a", 5, 0),))
    assert "Preempt" in traced.step(ev.Reported("w0#1", "w0", evicted), 4.0)
    assert "Resume" in traced.step(ev.Round(), 6.0)
    done = Report(2, 2, finished=(Completion("a", 9, FinishReason.STOP),))
    traced.step(ev.Reported("w0#1", "w0", done), 7.0)
    assert traced.queues == [
        (1.0, 3.0, "arrival", "placed"),
        (4.0, 6.0, "preempted", "resumed"),
    ]
    [forecast] = [span for span in traced.written.all if span.name == "forecast"]
    assert (forecast.parent, forecast.start_s, forecast.end_s) == ("p", 1.0, 1.5)
    assert forecast.attributes["foretoken.forecast.mean_tokens"] == 20.0
    assert {span.attributes["foretoken.request.id"] for span in traced.written.all} == {"a"}
    assert not traced.spans._traced


def test_queue_span_of_request_that_never_runs_ends_with_it():
    traced = Traced()
    traced.step(worker(), 0.0)
    traced.submit("long", 1.0, most=5_000)
    traced.submit("left", 2.0)
    traced.step(ev.Cancelled(G, "left", FinishReason.CANCELLED, 0), 3.0)
    traced.submit("lost", 4.0)
    traced.step(ev.GatewayLost(G), 5.0)
    assert traced.queues == [
        (1.0, 1.0, "arrival", "too_long"),
        (2.0, 3.0, "arrival", "cancelled"),
        (4.0, 5.0, "arrival", "gateway_lost"),
    ]
    ends = [span.end_s for span in traced.written.all if span.name == "forecast"]
    assert ends == [3.0, 5.0]
    assert not traced.spans._traced


def test_resubmission_ends_first_forecast_span():
    traced = Traced()
    traced.submit("a", 1.0)
    again = ev.Submitted("another", request("a", at=2.0))
    assert "AskForecast" in traced.step(again, 2.0)
    traced.send_forecast("a", 3.0)
    spans = [span for span in traced.written.all if span.name == "forecast"]
    assert [(span.start_s, span.end_s) for span in spans] == [(1.0, 2.0), (2.0, 3.0)]


def test_untraced_request_has_no_spans():
    traced = Traced()
    traced.submit("a", 1.0, parent="")
    traced.submit("b", 1.0, parent="p")
    traced.step(ev.Cancelled(G, "a", FinishReason.CANCELLED, 0), 2.0)
    assert {span.attributes["foretoken.request.id"] for span in traced.written.all} == {"b"}
    off = SchedulerSpans(NO_SPANS)
    off.submitted("a", "p", 0.0)
    assert not off._traced


def test_traced_requests_are_bounded():
    spans = SchedulerSpans(WrittenSpans())
    for number in range(MAX_TRACED + 2):
        spans.submitted(f"r{number}", "p", 0.0)
    assert len(spans._traced) == MAX_TRACED


@pytest.mark.parametrize("again", [False, True])
def test_repeated_submission_keeps_trace(again: bool) -> None:
    traced = Traced()
    traced.submit("a", 1.0)
    traced.send_forecast("a", 1.0)
    if again:
        traced.spans.submitted("a", "p", 2.0)
    traced.step(worker(), 3.0)
    traced.step(ev.Round(), 3.0)
    assert traced.queues == [(1.0, 3.0, "arrival", "placed")]
