"""Answers: the length and the tokens of emulated answers, as functions of the prompt.

Equal prompts have equal answers, whatever their sampling parameters and wherever they run, so that
a moved request continues with the same text.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import exp
from statistics import NormalDist

import numpy as np

from services.runtime.bounded_dict import BoundedDict
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence as Request

KEPT = 8_192  # answers of live requests; one that was dropped is made again
NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """A lognormal distribution of output tokens."""

    median_tokens: float
    sigma: float

    def tokens(self, share: float) -> int:
        """The quantile at this share, which lies between 0 and 1; at least 1."""
        return max(1, round(self.median_tokens * exp(self.sigma * NORMAL.inv_cdf(share))))


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` with the end token; the others are at `first`, `first + stride` … of the table."""

    tokens: int
    first: int
    stride: int


class Answers:
    """Draws the tokens of all requests.

    `known` are lengths by the texts of a prompt, which `texts` yields in order of preference; other
    lengths follow `law`. `words` is the table of tokens, `eos` the token that ends an answer.
    """

    def __init__(
        self,
        words: Sequence[int],
        eos: int,
        law: LengthLaw,
        known: Mapping[str, int] | None = None,
        texts: Callable[[Sequence[int]], Iterable[str]] = lambda _: (),
    ):
        self._words, self._eos, self._law = tuple(words), eos, law
        self._known, self._texts = known or {}, texts
        self._live = BoundedDict[str, Answer](KEPT)

    def draw(self, request: Request) -> int:
        """The next token of a request. The end token waits for `min_tokens`, and is not drawn with
        `ignore_eos`. O(1) after the first call for the request."""
        answer = self._live.get(request.request_id)
        if answer is None:
            answer = self._live[request.request_id] = self.answer(request.prompt)
        length = len(request.tokens)
        output = length - request.prompt_tokens
        if output + 1 >= answer.tokens and request.ends_on_eos and length >= request.min_length:
            return self._eos
        return self._words[(answer.first + output * answer.stride) % len(self._words)]

    def answer(self, prompt: Prompt) -> Answer:
        """The answer to a prompt. O(prompt)."""
        ids = prompt.token_ids[: prompt.prompt_tokens]
        digest = blake2b(np.array(ids, np.int64).tobytes(), digest_size=24).digest()
        share, first, stride = (int.from_bytes(digest[at : at + 8]) for at in (0, 8, 16))
        tokens = self._find(ids) or self._law.tokens((share + 0.5) / 2**64)
        size = len(self._words)
        return Answer(tokens, first % size, 1 + stride % max(1, size - 1))

    def _find(self, ids: Sequence[int]) -> int | None:
        """The known length of a prompt, if any."""
        if not self._known:
            return None
        return next((self._known[t] for t in self._texts(ids) if t in self._known), None)
