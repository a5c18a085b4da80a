"""How a replayed run's requests kept their SLAs, by what workers reported.

While it serves, the gateway knows better: it has the tokens. Of a log there are the reports alone:
a token is taken to come when it is told, several told together at equal gaps.
"""

from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from services.core import FinishReason, Request, RequestProgress
from services.scheduler.core import events as ev
from services.sla import RequestTimeline, explain_sla


class ReplayJudge:
    """Follows every request of a log; what it says of those that have ended is in `verdicts`."""

    def __init__(self) -> None:
        self.verdicts: dict[str, str] = {}
        self._live: dict[str, tuple[Request, RequestTimeline]] = {}
        self._kinds: dict[str, Callable[[Any, float], None]] = {
            "place": self._placed,
            "resume": self._resumed,
            "preempt": self._preempted,
            "finish": self._finished,
            "refuse": self._refused,
        }

    def hear(self, event: ev.Event, now: float, actions: Sequence[ev.Action]) -> None:
        """One step of the log."""
        if isinstance(event, ev.Submitted):
            asked = event.request
            refused = any(isinstance(a, ev.Refuse) and not asked.delivered_tokens for a in actions)
            if asked.request_id not in self._live or not refused:
                self._live[asked.request_id] = (asked, RequestTimeline(asked.arrival_s))
        elif isinstance(event, ev.Reported):
            for told in (*event.report.progress, *event.report.evicted):
                self._made(told, now)
        for action in actions:
            if heard := self._kinds.get(action.kind):
                heard(action, now)
        if isinstance(event, ev.Cancelled):
            self._ends(event.request_id, event.reason, event.output_tokens, now)

    def _made(self, told: RequestProgress, now: float) -> None:
        request, line = self._live.get(told.request_id, (None, None))
        if request and line:
            count = told.output_tokens - request.delivered_tokens - line.tokens
            if count > 0:
                line.on_tokens(count, now, gaps=count)

    def _placed(self, action: ev.Place, now: float) -> None:
        _, line = self._live.get(action.request_id, (None, None))
        if line and line.placed_s < inf:
            line.on_resumed(False, now)
        elif line:
            line.placed_s = now

    def _resumed(self, action: ev.Resume, now: float) -> None:
        _, line = self._live.get(action.request_id, (None, None))
        if line:
            line.placed_s = min(line.placed_s, now)
            line.on_resumed(action.held_tokens > 0, now)

    def _preempted(self, action: ev.Preempt, now: float) -> None:
        _, line = self._live.get(action.request_id, (None, None))
        if line:
            line.on_preempted()

    def _finished(self, action: ev.Finish, now: float) -> None:
        self._ends(action.request_id, action.reason, action.output_tokens, now)

    def _refused(self, action: ev.Refuse, now: float) -> None:
        _, line = self._live.get(action.request_id, (None, None))
        if line:
            line.rejected = True
            self._ends(action.request_id, FinishReason.ERROR, 0, now)

    def _ends(self, request_id: str, reason: FinishReason, output: int, now: float) -> None:
        request, line = self._live.get(request_id, (None, None))
        if request is None or line is None:
            return
        self._made(RequestProgress(request_id, output, 0), now)
        line.ended_s = now
        if not request.delivered_tokens:  # else only its gateway saw all of it
            said = explain_sla(request.sla, line, reason)
            self.verdicts[request_id] = f"by its worker's reports, {said}"
        del self._live[request_id]
