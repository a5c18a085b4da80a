"""How the last requests that ended kept their SLAs, as their clients saw it, for who asks why."""

from collections import OrderedDict
from typing import NamedTuple

from protos import scheduler_pb2
from services.core import FinishReason, Sla
from services.verdict import Timeline, sentence

JUDGED = "judged"  # the kind of chapter in which a scheduler gives its own reckoning


class Ended(NamedTuple):
    sla: Sla
    line: Timeline
    reason: FinishReason


class Verdicts:
    """Of the last `most` choices, by the id of their last submission."""

    def __init__(self, most: int):
        self._most = most
        self._ended: OrderedDict[str, Ended] = OrderedDict()

    def keep(self, wire_id: str, ended: Ended) -> None:
        self._ended[wire_id] = ended
        if len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def judge(self, story: scheduler_pb2.Story) -> None:
        """What the client was sent settles it: put in place of the scheduler's reckoning, which
        knows workers' reports alone."""
        ended = self._ended.get(story.request_id)
        if ended is None:
            return
        others = [chapter for chapter in story.chapters if chapter.kind != JUDGED]
        text = f"as its client saw it, {sentence(*ended)}"
        at_s = ended.line.ended_s - ended.line.arrival_s
        del story.chapters[:]
        story.chapters.extend(others)
        story.chapters.append(scheduler_pb2.Chapter(at_s=at_s, kind=JUDGED, text=text, times=1))
