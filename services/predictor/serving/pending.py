"""What was foretold of requests that still run, kept until their outcome comes."""

from dataclasses import dataclass

from services.predictor.blend.guard import Made
from services.predictor.interface import Prompt
from services.predictor.serving.newest_first_queue import Newest


@dataclass(frozen=True, slots=True)
class Waiting:
    """One request's forecast, and what it was made from.

    packed: its features as the log keeps them; empty where there are none. prompt: its text, only
    where that may be kept.
    """

    made: Made
    packed: bytes = b""
    prompt: Prompt | None = None


class Pending(Newest[Waiting]):
    """By the requests' ids; one without is not kept."""

    def put(self, key: str, item: Waiting) -> None:
        """What was made without features does not replace what waits: it renews a shared forecast
        while the request runs, and the one to be judged is that of its beginning."""
        if key and (item.packed or self.get(key) is None):
            super().put(key, item)
