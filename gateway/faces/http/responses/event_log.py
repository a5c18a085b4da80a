"""The events of background responses, for clients that read them later or again."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence, Set
from dataclasses import dataclass

from services.runtime.errors import InvalidArgument

STARTING_AFTER = "starting_after"


@dataclass(frozen=True, slots=True)
class EventNews:
    """Events to add to a copy of a log, from the number `begin` on. The copy then begins with the
    event `first`, and no event follows if the log has `ended`."""

    first: int
    begin: int
    events: Sequence[bytes]
    ended: bool


def check_kept(after: int, first: int) -> None:
    """Raises InvalidArgument if the event behind `after` is before the `first` that is kept."""
    if after + 1 < first:
        raise InvalidArgument(
            STARTING_AFTER,
            f"the events up to {first - 1} are not kept any more; use a number from "
            f"{first - 1} on, or retrieve the response without stream",
        )


class EventLog:
    """The last events of one response, within a number and a size, and those of its last step.
    Readers wait for more."""

    def __init__(self, max_events: int, max_bytes: int):
        self.ended = False
        self.first = 0  # number of the oldest one that is kept
        self._max_events, self._max_bytes = max_events, max_bytes
        self._events: list[bytes] = []
        self._bytes = 0
        self._news = asyncio.Event()  # of those that wait now
        self._popped = 0  # number of the first event that `pop_news` has not returned
        self._end_popped = False  # the end was returned, too

    def add(self, events: Sequence[bytes]) -> None:
        """Adds events that belong together. Of those before them, the limits keep the last ones: a
        reader that waits receives every event, whatever its size."""
        dropped = 0
        while len(self._events) - dropped > self._max_events or self._bytes > self._max_bytes:
            self._bytes -= len(self._events[dropped])
            dropped += 1
        del self._events[:dropped]
        self.first += dropped
        self._events += events
        self._bytes += sum(map(len, events))
        self._wake()

    def pop_news(self) -> "EventNews | None":
        """What has changed since the last call; None without a change. Later calls do not return
        these events again. O(new events)."""
        begin = max(self._popped, self.first)
        after = self.first + len(self._events)
        if self._end_popped or (begin == after and not self.ended):
            return None
        self._popped, self._end_popped = after, self.ended
        return EventNews(self.first, begin, tuple(self._events[begin - self.first :]), self.ended)

    def put_back(self, news: EventNews) -> None:
        """The next `pop_news` returns what this one has, as far as it is kept by then."""
        self._popped, self._end_popped = news.begin, False

    def end(self) -> None:
        """No event follows."""
        self.ended = True
        self._wake()

    def check(self, after: int) -> None:
        """Raises InvalidArgument if the event that follows is not kept."""
        check_kept(after, self.first)

    async def read(self, after: int) -> AsyncGenerator[bytes]:
        """The events that follow the one of a number, up to the end. Raises InvalidArgument once
        the next one is not kept: the reader is too slow."""
        at = after + 1
        while True:
            self.check(at - 1)
            if found := self._events[at - self.first :]:
                at += len(found)
                yield b"".join(found)
            elif self.ended:
                return
            else:
                await self._news.wait()

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class EventLogs:
    """The logs of a process: those of responses that run, and of those that ended last."""

    def __init__(self, max_logs: int, max_events: int, max_bytes: int):
        """`max_logs`: at least as many as responses may run; the other limits are of each log."""
        self._max_logs, self._max_events, self._max_bytes = max_logs, max_events, max_bytes
        self._logs: dict[str, EventLog] = {}

    def open(self, response_id: str) -> EventLog:
        """A log for a response that begins."""
        ended = [name for name, log in self._logs.items() if log.ended]
        for name in ended[: len(self._logs) + 1 - self._max_logs]:
            del self._logs[name]
        log = self._logs[response_id] = EventLog(self._max_events, self._max_bytes)
        return log

    def find(self, response_id: str) -> EventLog | None:
        return self._logs.get(response_id)

    def drop(self, response_id: str) -> None:
        self._logs.pop(response_id, None)

    @property
    def names(self) -> Set[str]:
        return self._logs.keys()

    def pop_news(self) -> Mapping[str, EventNews]:
        """What has changed in each log since the last call. O(logs + new events)."""
        return {name: news for name, log in self._logs.items() if (news := log.pop_news())}

    def put_back(self, news: Mapping[str, EventNews]) -> None:
        """The next `pop_news` returns these of each log, too. O(logs)."""
        for name, each in news.items():
            if log := self._logs.get(name):
                log.put_back(each)
