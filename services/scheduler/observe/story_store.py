"""Bounded storage of request stories."""

from itertools import chain

from services.runtime.bounded_dict import BoundedDict
from services.scheduler.observe.story import OpenStory

REFUSED_SHARE = 4  # refused requests fill at most 1/4 of the bound, so that they displace no others


class StoryStore:
    """Stories of live requests by id, of the last `max_ended` that ended, and of some refused
    ones."""

    def __init__(self, max_ended: int):
        self.live: dict[str, OpenStory] = {}
        self.ended_count = 0
        self._ended = BoundedDict[str, OpenStory](max_ended)
        self._refused = BoundedDict[str, OpenStory](max_ended // REFUSED_SHARE)

    @property
    def kept_count(self) -> int:
        """Stories of ended requests."""
        return len(self._ended) + len(self._refused)

    def knows(self, request_id: str) -> bool:
        return request_id in self.live or self.ended(request_id) is not None

    def ended(self, request_id: str) -> OpenStory | None:
        return self._ended.get(request_id) or self._refused.get(request_id)

    def ids(self, prefix: str) -> list[str]:
        """Requests whose ids start with this. O(stories)."""
        every = chain(self.live, self._ended, self._refused)
        return [request_id for request_id in every if request_id.startswith(prefix)]

    def end(self, story: OpenStory) -> None:
        del self.live[story.request_id]
        self._keep(story, self._ended)

    def refuse(self, story: OpenStory) -> None:
        self._keep(story, self._refused)

    def _keep(self, story: OpenStory, among: BoundedDict[str, OpenStory]) -> None:
        self.ended_count += 1
        among.pop(story.request_id, None)
        among[story.request_id] = story
