"""What was foretold of requests that still run, kept until their outcome comes."""

from collections import OrderedDict
from dataclasses import dataclass

from services.predictor.blend.guard import Made
from services.predictor.interface import Prompt


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request's forecast, and what it was made from.

    packed: its features as the log keeps them; empty where there are none. prompt: its text, only
    where that may be kept.
    """

    made: Made
    packed: bytes = b""
    prompt: Prompt | None = None


class Pending:
    """At most `most` requests; the one that waits longest goes first, counted in `dropped`."""

    def __init__(self, most: int):
        self.dropped = 0
        self._most = most
        self._waiting: OrderedDict[str, Waiting] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, request_id: str, waiting: Waiting) -> None:
        """What was made without features does not replace what waits: it renews a shared forecast
        while the request runs, and the one to be judged is that of its beginning."""
        if not request_id or (request_id in self._waiting and not waiting.packed):
            return
        self._waiting[request_id] = waiting
        self._waiting.move_to_end(request_id)
        if len(self._waiting) > self._most:
            self._waiting.popitem(last=False)
            self.dropped += 1

    def get(self, request_id: str) -> Waiting | None:
        return self._waiting.get(request_id)

    def improve(self, request_id: str, waiting: Waiting) -> None:
        """In place of what waits, if anything does: the request is as old as it was."""
        if request_id in self._waiting:
            self._waiting[request_id] = waiting

    def take(self, request_id: str) -> Waiting | None:
        """Gives it up, if it is there."""
        return self._waiting.pop(request_id, None)
