"""Spans of traced requests on this worker, from the plans, tokens and reports that pass.

A `slice` span lasts from the start of a budget until it is used up, or the request is paused,
evicted or ended. A `swap` span is the transfer of a request's KV to host memory or back. Spans read
no state of the engine. They are made on the event loop; without traced requests an event costs a
dict lookup.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from observability.tracing import REQUEST_ID, Spans, Value
from services.core import Plan, Report
from services.runtime.bounded_dict import BoundedDict
from services.worker.requests.types.batch import NewToken

MOST_TRACED = 8_192  # equals the limit of held prompts; the oldest is dropped
MOST_AHEAD = 64  # budgets of one request that are not used up; further ones extend the last
FIRST_TOKEN = "first_token"


@dataclass(slots=True)
class _TracedRequest:
    """A traced request on this worker."""

    parent: str
    output_tokens: int  # in total
    limits: deque[int] = field(default_factory=deque)  # budgets not used up, ascending
    since_s: float = inf  # beginning of the current slice; infinite without one
    first_token_s: float = inf  # time of the slice's first token
    start_tokens: int = 0  # output tokens at the beginning of the slice


class WorkerSpans:
    """Makes spans of the worker's events."""

    def __init__(self, spans: Spans):
        self._spans = spans
        self._requests = BoundedDict[str, _TracedRequest](MOST_TRACED)
        # admissions before their prompts
        self._admitted = BoundedDict[str, tuple[int, float]](MOST_TRACED)

    def on_prompt(self, request_id: str, parent: str, delivered: int, now_s: float) -> None:
        """A prompt has arrived, with `delivered` output tokens; plan and prompt arrive in either
        order."""
        if not self._spans.on:
            return
        limit, since_s = self._admitted.pop(request_id, (0, now_s))
        if not parent:
            return
        request = self._requests[request_id] = _TracedRequest(parent, delivered)
        if limit:
            self._grant(request, limit, since_s)

    def on_plan(self, plan: Plan, now_s: float) -> None:
        """A plan has arrived. O(its directives)."""
        if not self._spans.on:
            return
        for grant in plan.admit:
            if request := self._requests.get(grant.request_id):
                self._grant(request, grant.limit_tokens, now_s)
            else:
                self._admitted[grant.request_id] = (grant.limit_tokens, now_s)
        for grant in plan.extend:
            if request := self._requests.get(grant.request_id):
                self._grant(request, grant.limit_tokens, now_s)
        for pause in plan.pause:
            self._stop(pause.request_id, "paused", now_s)
        for request_id in plan.cancel:
            self._finish(request_id, "cancelled", now_s)

    def on_tokens(self, tokens: Iterable[NewToken], now_s: float) -> None:
        """A step has made these tokens. O(tokens) while any request is traced."""
        if not self._requests:
            return
        for token in tokens:
            request = self._requests.get(token.request_id)
            if request is None:
                continue
            request.output_tokens = token.offset + 1
            request.first_token_s = min(request.first_token_s, now_s)
            if token.finish is not None:
                self._finish(token.request_id, token.finish.value, now_s)
            elif request.limits and request.output_tokens >= request.limits[0]:
                self._end_slice(token.request_id, request, "budget", now_s)
                request.limits.popleft()
                if request.limits:
                    self._begin_slice(request, now_s)

    def on_report(self, report: Report, now_s: float) -> None:
        """A report is sent. O(the report) while any request is traced."""
        if not self._requests:
            return
        for evicted in report.evicted:
            self._stop(evicted.request_id, "evicted", now_s)
        for swap in report.swaps:
            if request := self._requests.get(swap.request_id):
                about: dict[str, Value] = {
                    REQUEST_ID: swap.request_id,
                    "foretoken.swap.direction": swap.direction.value,
                    "foretoken.swap.tokens": swap.tokens,
                }
                self._spans.record("swap", request.parent, now_s - swap.elapsed_s, now_s, about)
        for done in report.finished:
            self._finish(done.request_id, done.reason.value, now_s)

    def _grant(self, request: _TracedRequest, limit: int, now_s: float) -> None:
        if limit <= (request.limits[-1] if request.limits else request.output_tokens):
            return
        if len(request.limits) == MOST_AHEAD:
            request.limits[-1] = limit
            return
        request.limits.append(limit)
        if request.since_s == inf:
            self._begin_slice(request, now_s)

    def _begin_slice(self, request: _TracedRequest, now_s: float) -> None:
        request.since_s, request.first_token_s, request.start_tokens = (
            now_s,
            inf,
            request.output_tokens,
        )

    def _end_slice(self, request_id: str, request: _TracedRequest, why: str, now_s: float) -> None:
        if request.since_s == inf:
            return
        about: dict[str, Value] = {
            REQUEST_ID: request_id,
            "foretoken.slice.tokens": request.output_tokens - request.start_tokens,
            "foretoken.slice.limit": request.limits[0] if request.limits else request.output_tokens,
            "foretoken.slice.end": why,
        }
        span = self._spans.begin("slice", request.parent, request.since_s, about)
        if not request.start_tokens and request.first_token_s < inf:
            span.mark(FIRST_TOKEN, request.first_token_s)
        span.end(now_s)
        request.since_s = inf

    def _stop(self, request_id: str, why: str, now_s: float) -> None:
        """The request stops running but stays on this worker."""
        if request := self._requests.get(request_id):
            self._end_slice(request_id, request, why, now_s)
            request.limits.clear()

    def _finish(self, request_id: str, why: str, now_s: float) -> None:
        if request := self._requests.pop(request_id, None):
            self._end_slice(request_id, request, why, now_s)
