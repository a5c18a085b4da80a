"""What was foretold of a prompt when it was read, for whoever asks the same again."""

from dataclasses import dataclass
from hashlib import blake2b

from cachetools import LRUCache

from services.forecast import Forecast
from services.predictor.interface import Prompt, Query


@dataclass(frozen=True, slots=True)
class Seen:
    """A prompt's forecast, its features as the log keeps them, and the edition of the models that
    made it: another edition may say otherwise."""

    by_model: Forecast
    packed: bytes
    edition: int


class Remembered:
    """By model, application and prompt, at most `most`; the least recently used goes first."""

    def __init__(self, most: int):
        self._known: LRUCache[bytes, Seen] = LRUCache(most)

    def get(self, query: Query) -> Seen | None:
        return self._known.get(_key(query, query.prompt)) if query.prompt else None

    def put(self, query: Query, seen: Seen) -> None:
        if query.prompt:
            self._known[_key(query, query.prompt)] = seen


def _key(query: Query, prompt: Prompt) -> bytes:
    digest = blake2b(digest_size=16)
    for part in (query.model, query.application, prompt.instruction, prompt.user_input):
        digest.update(len(part).to_bytes(4, "little") + part.encode("utf-8", "surrogatepass"))
    digest.update(repr((prompt.prompt_tokens, prompt.answers)).encode())
    return digest.digest()
