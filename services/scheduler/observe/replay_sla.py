"""Judges the SLAs of a replayed run by its workers' reports.

A gateway judges by the tokens it receives. An event log has only the reports: tokens count as
arrived when they are reported, several in one report at equal gaps. Delivery to the client is not
included.
"""

from services.core import FinishReason, Request
from services.scheduler.core import events as ev
from services.scheduler.core.phases import Transition, TransitionCause
from services.sla import RequestTimeline, explain_sla


class ReplayJudge:
    """Follows every request of a log. `verdicts` holds a sentence for each that has ended."""

    def __init__(self) -> None:
        self.verdicts: dict[str, str] = {}
        self._live: dict[str, tuple[Request, RequestTimeline]] = {}

    def observe(self, step: ev.Step) -> None:
        match step.event:
            case ev.Submitted(request=request):
                refused = any(t.cause is TransitionCause.REFUSED for t in step.transitions)
                if request.request_id not in self._live or not (
                    refused and not request.delivered_tokens
                ):
                    self._live[request.request_id] = (request, RequestTimeline(request.arrival_s))
            case ev.Reported(report=report):
                for progress in (*report.progress, *report.evicted):
                    self._generated(progress.request_id, progress.output_tokens, step.now)
        for transition in step.transitions:
            self._changed(transition)

    def _generated(self, request_id: str, output_tokens: int, now: float) -> None:
        if known := self._live.get(request_id):
            request, timeline = known
            count = output_tokens - request.delivered_tokens - timeline.tokens
            if count > 0:
                timeline.on_tokens(count, now, gaps=count)

    def _changed(self, t: Transition) -> None:
        known = self._live.get(t.request_id)
        if known is None:
            return
        _, timeline = known
        match t.cause:
            case TransitionCause.PLACED if timeline.placed_s == float("inf"):
                timeline.placed_s = t.at_s
            case TransitionCause.PLACED:
                timeline.on_resumed(False, t.at_s)
            case _ if t.resumes:
                timeline.placed_s = min(timeline.placed_s, t.at_s)
                timeline.on_resumed(t.held_tokens > 0, t.at_s)
            case _ if t.interrupts:
                timeline.on_preempted()
            case TransitionCause.REFUSED:
                timeline.rejected = True
                self._end(t, FinishReason.ERROR)
            case TransitionCause.FINISHED | TransitionCause.CANCELLED:
                self._end(t, FinishReason(t.reason))

    def _end(self, t: Transition, reason: FinishReason) -> None:
        output_tokens = 0 if t.cause is TransitionCause.REFUSED else t.output_tokens
        self._generated(t.request_id, output_tokens, t.at_s)
        request, timeline = self._live.pop(t.request_id)
        timeline.ended_s = t.at_s
        if not request.delivered_tokens:  # else its earlier tokens are not in this log
            verdict = explain_sla(request.sla, timeline, reason)
            self.verdicts[t.request_id] = (
                f"by its worker's reports, without delivery to the client, {verdict}"
            )
