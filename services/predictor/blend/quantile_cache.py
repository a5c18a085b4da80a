"""What was said of a prompt before, for as long as it would be said again."""

from collections.abc import Callable, Sequence
from hashlib import blake2b

import numpy as np
from cachetools import LRUCache

from services.predictor.interface import Query
from services.predictor.models.spread import Floats

MOST = 4_096  # prompts; six members' spreads are 3 kB each
STALE = 256  # outcomes learnt, after which history and neighbours may say otherwise

Key = tuple[str, str, bytes]


class Recall:
    """Members' spreads [members, 64] by model, application and features; of MOST prompts, the
    least recently asked about goes first."""

    def __init__(self) -> None:
        self.edition = 0  # counts what was forgotten
        self._said: LRUCache[Key, Floats] = LRUCache(MOST)
        self._learnt = 0

    def spreads(
        self, queries: Sequence[Query], ask: Callable[[Sequence[Query]], list[Floats]]
    ) -> list[Floats]:
        """[n, 64] a member: remembered rows, and `ask`'s for the others, in one call."""
        keys = [_key(query) for query in queries]
        new = {k: q for k, q in zip(keys, queries, strict=True) if k not in self._said}
        said = {key: self._said[key] for key in keys if key in self._said}
        if new:
            rows = np.stack(ask(list(new.values())), axis=1)
            said |= zip(new, rows, strict=True)
        self._said.update(said)
        return list(np.stack([said[key] for key in keys], axis=1))

    def learnt(self, outcomes: int) -> None:
        self._learnt += outcomes
        if self._learnt >= STALE:
            self.forget()

    def forget(self) -> None:
        self.edition += 1
        self._said.clear()
        self._learnt = 0


def _key(query: Query) -> Key:
    features = query.features
    assert features is not None
    digest = blake2b(digest_size=16)
    for part in (features.user_input, features.instruction, features.words, features.numbers):
        digest.update(part.data)
    return query.model, query.application, digest.digest()
