"""Outcomes of the last ended choices, to add the client's view to their stories."""

from gateway.sessions.sla_window import SlaWindow
from gateway.types.outcome import ChoiceOutcome
from protos.generated import scheduler_pb2
from services.runtime.bounded_dict import BoundedDict
from services.sla import explain_sla

JUDGED = "judged"  # the kind of the added chapter


class OutcomeHistory:
    """The last `max_outcomes` outcomes by the id of the last submission, and their SLA window."""

    def __init__(self, max_outcomes: int):
        self.sla_window = SlaWindow()
        self._outcomes = BoundedDict[str, ChoiceOutcome](max_outcomes)

    def add(self, wire_id: str, outcome: ChoiceOutcome) -> None:
        timeline = outcome.timeline
        self.sla_window.add(outcome.sla.name, outcome.cause, timeline.tokens, timeline.ended_s)
        self._outcomes[wire_id] = outcome

    def add_verdict(self, story: scheduler_pb2.Story) -> None:
        """Adds the SLA verdict to the story of a choice that ended here. The scheduler's story
        contains only workers' reports."""
        if outcome := self._outcomes.get(story.request_id):
            timeline = outcome.timeline
            verdict = explain_sla(outcome.sla, timeline, outcome.reason)
            at_s = timeline.ended_s - timeline.arrival_s
            text = f"as its client saw it, {verdict}"
            story.chapters.add(at_s=at_s, kind=JUDGED, text=text, times=1)
            story.chapters.sort(key=lambda chapter: chapter.at_s)
