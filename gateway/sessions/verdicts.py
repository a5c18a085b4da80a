"""How the last requests that ended kept their SLAs, as their clients saw it, for who asks why."""

from collections import OrderedDict

from gateway.sessions.delivery import Ended
from gateway.sessions.recent import Recent
from protos.generated import scheduler_pb2
from services.sla import explain_sla

JUDGED = "judged"  # a chapter's kind


class Verdicts:
    """Of the last `most` choices, by the id of their last submission; and `recent`, their sums."""

    def __init__(self, most: int):
        self.recent = Recent()
        self._most = most
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def keep(self, wire_id: str, ended: Ended) -> None:
        self.recent.add(ended.sla.name, ended.cause, ended.line.tokens, ended.line.ended_s)
        self._ended[wire_id] = ended
        if len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def judge(self, story: scheduler_pb2.Story) -> None:
        """Add the verdict of one that ended here: a scheduler knows workers' reports alone."""
        if ended := self._ended.get(story.request_id):
            text = f"as its client saw it, {explain_sla(ended.sla, ended.line, ended.reason)}"
            at_s = ended.line.ended_s - ended.line.arrival_s
            story.chapters.add(at_s=at_s, kind=JUDGED, text=text, times=1)
            story.chapters.sort(key=lambda chapter: chapter.at_s)
