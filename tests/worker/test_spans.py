"""Slices and swaps of traced requests, from plans, tokens and reports."""

from math import inf

import pytest

from observability.tracing import NO_SPANS
from protos.generated import scheduler_pb2
from services.core import (
    Completion,
    FinishReason,
    Grant,
    Pause,
    Plan,
    Report,
    RequestProgress,
    Residency,
)
from services.costs import Direction, SwapTiming
from services.runtime.codecs.attach import decode_plan, encode_plan
from services.worker.requests.types.batch import NewToken
from services.worker.spans import MOST_AHEAD, MOST_TRACED, WorkerSpans
from tests.observability.tracing.otlp import WrittenSpans


def plan(**directives) -> Plan:
    """A plan as received."""
    wire = encode_plan(Plan(1, **directives)).SerializeToString()
    return decode_plan(scheduler_pb2.Plan.FromString(wire))


def admit(request_id: str, limit: int) -> Plan:
    return plan(admit=(Grant(request_id, limit),))


def token(request_id: str, offset: int, finish: FinishReason | None = None) -> list[NewToken]:
    return [NewToken("g#1", request_id, offset, 7, finish, None)]


class RecordedSpans:
    """A worker's spans, with one event per second."""

    def __init__(self) -> None:
        self.written = WrittenSpans()
        self.spans = WorkerSpans(self.written)

    def make(self, request_id: str, offsets: range, from_s: float) -> float:
        """Makes tokens, one per second; returns the time of the last."""
        for at, offset in enumerate(offsets):
            self.spans.on_tokens(token(request_id, offset), from_s + at)
        return from_s + len(offsets) - 1

    @property
    def slices(self) -> list[tuple[float, float | None, int, int, str]]:
        """Start, end, tokens, limit and end reason of each slice."""
        return [
            (
                span.start_s,
                span.end_s,
                span.attributes["foretoken.slice.tokens"],
                span.attributes["foretoken.slice.limit"],
                span.attributes["foretoken.slice.end"],
            )
            for span in self.written.all
            if span.name == "slice"
        ]


def test_consecutive_budgets_are_slices():
    sent = RecordedSpans()
    sent.spans.on_prompt("r", "p", 0, 0.0)
    sent.spans.on_plan(admit("r", 2), 1.0)
    sent.make("r", range(0, 2), 2.0)  # the budget is used up at 3
    sent.spans.on_plan(plan(extend=(Grant("r", 4),)), 5.0)
    sent.spans.on_plan(plan(extend=(Grant("r", 6),)), 6.0)  # before the present budget is used up
    sent.make("r", range(2, 5), 7.0)  # 4 tokens at 8, and the next slice begins at once
    sent.spans.on_tokens(token("r", 5, FinishReason.STOP), 11.0)
    assert sent.slices == [
        (1.0, 3.0, 2, 2, "budget"),
        (5.0, 8.0, 2, 4, "budget"),
        (8.0, 11.0, 2, 6, "stop"),
    ]
    assert {span.parent for span in sent.written.all} == {"p"}
    assert [span.marks for span in sent.written.all] == [[("first_token", 2.0)], [], []]


@pytest.mark.parametrize("plan_first", [False, True])
def test_span_needs_plan_and_prompt_in_any_order(plan_first: bool) -> None:
    sent = RecordedSpans()
    if plan_first:
        sent.spans.on_plan(admit("r", 9), 1.0)
        sent.spans.on_prompt("r", "p", 0, 2.0)
    else:
        sent.spans.on_prompt("r", "p", 0, 0.0)
        sent.spans.on_plan(admit("r", 9), 1.0)
    sent.spans.on_tokens(token("r", 0, FinishReason.LENGTH), 3.0)
    assert sent.slices == [(1.0, 3.0, 1, 9, "length")]


def test_resumed_request_s_span_continues_after_its_tokens():
    sent = RecordedSpans()
    sent.spans.on_prompt("r", "p", 5, 0.0)
    sent.spans.on_plan(admit("r", 8), 1.0)
    sent.make("r", range(5, 8), 2.0)
    assert sent.slices == [(1.0, 4.0, 3, 8, "budget")]
    assert sent.written.all[0].marks == []  # its first token was drawn elsewhere


def test_pause_eviction_or_cancel_ends_a_slice():
    sent = RecordedSpans()
    sent.spans.on_prompt("r", "p", 0, 0.0)
    sent.spans.on_plan(admit("r", 99), 1.0)
    sent.make("r", range(0, 3), 2.0)
    sent.spans.on_plan(plan(pause=(Pause("r", Residency.OFFLOAD),)), 5.0)
    sent.make("r", range(3, 4), 5.5)  # drawn before it received the pause
    sent.spans.on_plan(admit("r", 99), 8.0)
    sent.make("r", range(4, 5), 9.0)
    sent.spans.on_report(Report(1, 1, evicted=(RequestProgress("r", 5, 0),)), 10.0)
    sent.spans.on_plan(admit("r", 99), 12.0)
    sent.spans.on_plan(plan(cancel=("r",)), 13.0)
    sent.make("r", range(5, 6), 14.0)  # no longer traced
    assert sent.slices == [
        (1.0, 5.0, 3, 99, "paused"),
        (8.0, 10.0, 1, 99, "evicted"),
        (12.0, 13.0, 0, 99, "cancelled"),
    ]


def test_end_known_only_from_a_report_ends_the_span():
    sent = RecordedSpans()
    sent.spans.on_prompt("r", "p", 0, 0.0)
    sent.spans.on_plan(admit("r", 9), 1.0)
    error = Completion("r", 0, FinishReason.ERROR)
    sent.spans.on_report(Report(1, 1, finished=(error,)), 2.0)
    sent.spans.on_report(Report(2, 1, finished=(error,)), 3.0)
    assert sent.slices == [(1.0, 2.0, 0, 9, "error")]


def test_swap_span_belongs_to_its_request():
    sent = RecordedSpans()
    sent.spans.on_prompt("r", "p", 0, 0.0)
    swaps = (
        SwapTiming(Direction.OFFLOAD, 32, 0.25, 0.1, "r"),
        SwapTiming(Direction.UPLOAD, 32, 0.5, 0.1, "another"),
        SwapTiming(Direction.UPLOAD, 48, 0.5, 0.1, "r"),
    )
    sent.spans.on_report(Report(1, 1, swaps=swaps), 10.0)
    assert [
        (s.name, s.parent, s.start_s, s.end_s, s.attributes["foretoken.swap.direction"])
        for s in sent.written.all
    ] == [("swap", "p", 9.75, 10.0, "offload"), ("swap", "p", 9.5, 10.0, "upload")]


def test_untraced_request_leaves_nothing():
    sent = RecordedSpans()
    sent.spans.on_prompt("r", "", 0, 0.0)
    sent.spans.on_plan(admit("r", 2), 1.0)
    sent.make("r", range(0, 2), 2.0)
    sent.spans.on_plan(admit("never", 2), 1.0)
    assert not sent.written.all
    off = WorkerSpans(NO_SPANS)
    off.on_prompt("r", "p", 0, 0.0)
    off.on_plan(admit("r", 2), 1.0)
    assert not off._requests and not off._admitted


def test_traced_requests_are_bounded():
    sent = RecordedSpans()
    for number in range(MOST_TRACED + 3):
        sent.spans.on_plan(admit(f"early{number}", 2), 0.0)
        sent.spans.on_prompt(f"r{number}", "p", 0, 0.0)
    assert len(sent.spans._requests) == len(sent.spans._admitted) == MOST_TRACED
    last = f"r{MOST_TRACED + 2}"
    for limit in range(1, 3 * MOST_AHEAD):
        sent.spans.on_plan(admit(last, limit), 1.0)
    assert len(sent.spans._requests[last].limits) == MOST_AHEAD
    sent.make(last, range(0, 3 * MOST_AHEAD - 1), 2.0)
    assert [s[2] for s in sent.slices] == [1] * (MOST_AHEAD - 1) + [2 * MOST_AHEAD]
    assert sent.spans._requests[last].since_s == inf
