"""Spans of traced requests on this worker, from the plans, tokens and reports that pass.

A `slice` span lasts from the start of a budget until it is used up, or the request is paused,
evicted or ended. A `swap` span is the transfer of its KV to host memory or back. The worker's state
is not involved. All of it runs on the event loop; without traced requests it costs a dict lookup.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from observability.tracing import REQUEST_ID, Spans, Value
from services.core import Plan, Report
from services.worker.requests.types.batch import NewToken

MOST_TRACED = 8_192  # as many as prompts are held; the oldest is dropped
MOST_AHEAD = 64  # budgets of one request ahead; further ones extend the last
FIRST_TOKEN = "first_token"


@dataclass(slots=True)
class _Stay:
    """A traced request on this worker."""

    parent: str
    made: int  # output tokens in total
    limits: deque[int] = field(default_factory=deque)  # granted and not used up, ascending
    since_s: float = inf  # beginning of the current slice; infinite without one
    first_s: float = inf  # time of its first token
    had: int = 0  # output tokens at its beginning


class WorkerSpans:
    """Makes spans of the worker's events."""

    def __init__(self, spans: Spans):
        self._spans = spans
        self._stays: OrderedDict[str, _Stay] = OrderedDict()
        # admissions before their prompts
        self._admitted: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def received(self, request_id: str, parent: str, made: int, now_s: float) -> None:
        """A prompt has arrived, with `made` output tokens; plan and prompt arrive in either
        order."""
        if not self._spans.on:
            return
        limit, since_s = self._admitted.pop(request_id, (0, now_s))
        if not parent:
            return
        stay = self._stays[request_id] = _Stay(parent, made)
        if len(self._stays) > MOST_TRACED:
            self._stays.popitem(last=False)
        if limit:
            self._grant(stay, limit, since_s)

    def planned(self, plan: Plan, now_s: float) -> None:
        """A plan has arrived. O(its directives)."""
        if not self._spans.on:
            return
        for grant in plan.admit:
            if stay := self._stays.get(grant.request_id):
                self._grant(stay, grant.limit_tokens, now_s)
            else:
                self._admitted[grant.request_id] = (grant.limit_tokens, now_s)
                if len(self._admitted) > MOST_TRACED:
                    self._admitted.popitem(last=False)
        for grant in plan.extend:
            if stay := self._stays.get(grant.request_id):
                self._grant(stay, grant.limit_tokens, now_s)
        for pause in plan.pause:
            self._stop(pause.request_id, "paused", now_s)
        for request_id in plan.cancel:
            self._over(request_id, "cancelled", now_s)

    def tokens(self, tokens: Iterable[NewToken], now_s: float) -> None:
        """A step has made these tokens. O(tokens) while any request is traced."""
        if not self._stays:
            return
        for token in tokens:
            stay = self._stays.get(token.request_id)
            if stay is None:
                continue
            stay.made = token.offset + 1
            stay.first_s = min(stay.first_s, now_s)
            if token.finish is not None:
                self._over(token.request_id, token.finish.value, now_s)
            elif stay.limits and stay.made >= stay.limits[0]:
                self._end_slice(token.request_id, stay, "budget", now_s)
                stay.limits.popleft()
                if stay.limits:
                    self._begin_slice(stay, now_s)

    def reported(self, report: Report, now_s: float) -> None:
        """A report is sent. O(the report) while any request is traced."""
        if not self._stays:
            return
        for evicted in report.evicted:
            self._stop(evicted.request_id, "evicted", now_s)
        for swap in report.swaps:
            if stay := self._stays.get(swap.request_id):
                about: dict[str, Value] = {
                    REQUEST_ID: swap.request_id,
                    "foretoken.swap.direction": swap.direction.value,
                    "foretoken.swap.tokens": swap.tokens,
                }
                self._spans.record("swap", stay.parent, now_s - swap.elapsed_s, now_s, about)
        for done in report.finished:
            self._over(done.request_id, done.reason.value, now_s)

    def _grant(self, stay: _Stay, limit: int, now_s: float) -> None:
        if limit <= (stay.limits[-1] if stay.limits else stay.made):
            return
        if len(stay.limits) == MOST_AHEAD:
            stay.limits[-1] = limit
            return
        stay.limits.append(limit)
        if stay.since_s == inf:
            self._begin_slice(stay, now_s)

    def _begin_slice(self, stay: _Stay, now_s: float) -> None:
        stay.since_s, stay.first_s, stay.had = now_s, inf, stay.made

    def _end_slice(self, request_id: str, stay: _Stay, why: str, now_s: float) -> None:
        if stay.since_s == inf:
            return
        about: dict[str, Value] = {
            REQUEST_ID: request_id,
            "foretoken.slice.tokens": stay.made - stay.had,
            "foretoken.slice.limit": stay.limits[0] if stay.limits else stay.made,
            "foretoken.slice.end": why,
        }
        span = self._spans.begin("slice", stay.parent, stay.since_s, about)
        if not stay.had and stay.first_s < inf:
            span.mark(FIRST_TOKEN, stay.first_s)
        span.end(now_s)
        stay.since_s = inf

    def _stop(self, request_id: str, why: str, now_s: float) -> None:
        """The request stops running but stays on this worker."""
        if stay := self._stays.get(request_id):
            self._end_slice(request_id, stay, why, now_s)
            stay.limits.clear()

    def _over(self, request_id: str, why: str, now_s: float) -> None:
        if stay := self._stays.pop(request_id, None):
            self._end_slice(request_id, stay, why, now_s)
