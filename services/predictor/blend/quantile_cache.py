"""Caches the members' quantiles of recent prompts."""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from cachetools import LRUCache

from services.predictor.interface import Query
from services.predictor.models.spread import Floats

MAX_PROMPTS = 4_096  # with six members 3 kB each
MAX_OUTCOMES_BEHIND = 256  # entries expire after this many outcomes

Key = tuple[str, str, bytes]


class QuantileCache:
    """Members' quantiles [members, 64] by model, application and features; LRU with MAX_PROMPTS
    entries."""

    def __init__(self) -> None:
        self.edition = 0  # increases when the cache is cleared
        self._quantiles: LRUCache[Key, Floats] = LRUCache(MAX_PROMPTS)
        self._outcomes = 0

    def spreads(
        self, queries: Sequence[Query], compute: Callable[[Sequence[Query]], list[Floats]]
    ) -> list[Floats]:
        """Returns [n, 64] per member: cached rows, and one call of `compute` for the others."""
        keys = [_key(query) for query in queries]
        new = {k: q for k, q in zip(keys, queries, strict=True) if k not in self._quantiles}
        cached = {key: self._quantiles[key] for key in keys if key in self._quantiles}
        if new:
            rows = np.stack(compute(list(new.values())), axis=1)
            cached |= zip(new, rows, strict=True)
        self._quantiles.update(cached)
        return list(np.stack([cached[key] for key in keys], axis=1))

    def count_outcomes(self, outcomes: int) -> None:
        self._outcomes += outcomes
        if self._outcomes >= MAX_OUTCOMES_BEHIND:
            self.clear()

    def clear(self) -> None:
        self.edition += 1
        self._quantiles.clear()
        self._outcomes = 0


def _key(query: Query) -> Key:
    features = query.features
    assert features is not None
    digest = blake2b(digest_size=16)
    for part in (features.user_input, features.instruction, features.words, features.numbers):
        digest.update(part.data)
    return query.model, query.application, digest.digest()
