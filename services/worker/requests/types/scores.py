"""Log-probabilities of prompt tokens, and the opening that a request's first token carries."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Bytes of one prompt's scores in a message: a quarter of the message limit, so that several fit.
SCORES_BYTES = 4 * 2**20

Ids = NDArray[np.int64]
Logs = NDArray[np.float32]


class PromptLogprobs(NamedTuple):
    """Scores of consecutive prompt tokens, each given those before it: natural-log probabilities of
    the raw distribution, and the k most likely tokens at each position.

    ids, chosen [tokens]; top_ids, top [tokens, k].
    """

    ids: Ids
    chosen: Logs
    top_ids: Ids
    top: Logs

    @classmethod
    def room(cls, tokens: int, k: int) -> "PromptLogprobs":
        """Empty scores for this many tokens."""
        return cls(
            np.zeros(tokens, np.int64),
            np.zeros(tokens, np.float32),
            np.zeros((tokens, k), np.int64),
            np.full((tokens, k), -np.inf, np.float32),  # if the vocabulary is smaller than k
        )

    def fill(self, start: int, part: "PromptLogprobs") -> None:
        """Fills rows from `start` on, with at most k alternatives."""
        rows = slice(start, start + len(part.ids))
        self.ids[rows], self.chosen[rows] = part.ids, part.chosen
        k = min(self.top.shape[1], part.top.shape[1])
        self.top_ids[rows, :k], self.top[rows, :k] = part.top_ids[:, :k], part.top[:, :k]


def encoded_bytes(tokens: int, k: int) -> int:
    """An upper bound of the message size of this many scores with k alternatives each."""
    return tokens * (16 + 7 * k)


class Opening(NamedTuple):
    """`cached_tokens` of the prompt were in the prefix cache at admission. `prompt_logprobs` are
    those of all its tokens but the first, if requested."""

    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
