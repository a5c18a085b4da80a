"""Caches forecasts of prompts that were read."""

from dataclasses import dataclass
from hashlib import blake2b

from cachetools import LRUCache

from services.forecast import Forecast
from services.predictor.interface import Prompt, Query


@dataclass(frozen=True, slots=True)
class CachedForecast:
    """A prompt's forecast, its packed features, and the edition of the models that produced it."""

    by_model: Forecast
    packed: bytes
    edition: int


class ForecastCache:
    """LRU cache by model, application and prompt, with at most `max_entries` entries."""

    def __init__(self, max_entries: int):
        self._forecasts: LRUCache[bytes, CachedForecast] = LRUCache(max_entries)

    def get(self, query: Query) -> CachedForecast | None:
        return self._forecasts.get(_key(query, query.prompt)) if query.prompt else None

    def put(self, query: Query, forecast: CachedForecast) -> None:
        if query.prompt:
            self._forecasts[_key(query, query.prompt)] = forecast


def _key(query: Query, prompt: Prompt) -> bytes:
    digest = blake2b(digest_size=16)
    for part in (query.model, query.application, prompt.instruction, prompt.user_input):
        digest.update(len(part).to_bytes(4, "little") + part.encode("utf-8", "surrogatepass"))
    digest.update(repr((prompt.prompt_tokens, prompt.answers)).encode())
    return digest.digest()
