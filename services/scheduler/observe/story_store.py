"""Where stories stand: of all who live, of the last that have ended, of some that were refused."""

from collections import OrderedDict
from itertools import chain

from services.scheduler.observe.story import OpenStory

REFUSED_SHARE = 4  # one in so many stories may be of one refused: a storm of them hides no other


class StoryStore:
    """`live` are found by their ids; of those that have ended `ended_most` are kept, and a share as
    many of those refused at the door; the oldest go first."""

    def __init__(self, ended_most: int):
        self.live: dict[str, OpenStory] = {}
        self.ended_count = 0
        self._ended_most = ended_most
        self._ended: OrderedDict[str, OpenStory] = OrderedDict()
        self._refused: OrderedDict[str, OpenStory] = OrderedDict()

    @property
    def kept_count(self) -> int:
        """Of those that have ended."""
        return len(self._ended) + len(self._refused)

    def knows(self, request_id: str) -> bool:
        return request_id in self.live or self.over(request_id) is not None

    def over(self, request_id: str) -> OpenStory | None:
        """One that has ended, or was refused."""
        return self._ended.get(request_id) or self._refused.get(request_id)

    def ids(self, beginning: str) -> list[str]:
        """Requests whose ids begin so. O(stories)."""
        every = chain(self.live, self._ended, self._refused)
        return [request_id for request_id in every if request_id.startswith(beginning)]

    def end(self, tale: OpenStory) -> None:
        del self.live[tale.request.request_id]
        self._keep(tale, self._ended, self._ended_most)

    def refuse(self, tale: OpenStory) -> None:
        self._keep(tale, self._refused, self._ended_most // REFUSED_SHARE)

    def _keep(self, tale: OpenStory, among: "OrderedDict[str, OpenStory]", most: int) -> None:
        self.ended_count += 1
        name = tale.request.request_id
        among.pop(name, None)
        among[name] = tale
        while len(among) > most:
            among.popitem(last=False)
