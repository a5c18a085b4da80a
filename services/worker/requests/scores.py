"""How likely a prompt's own tokens were, and what else is told with a request's first token."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Of one prompt's in a message, with its first token: a quarter of what a message may be, so that a
# few fit.
SCORES_BYTES = 4 * 2**20

Ids = NDArray[np.int64]
Logs = NDArray[np.float32]


class PromptLogprobs(NamedTuple):
    """Of some of a prompt's tokens, in order, each given those before it: natural-log
    probabilities of the raw distribution, and the k likeliest in its place.

    ids, chosen [tokens]; top_ids, top [tokens, k].
    """

    ids: Ids
    chosen: Logs
    top_ids: Ids
    top: Logs

    @classmethod
    def room(cls, tokens: int, k: int) -> "PromptLogprobs":
        """For so many tokens, to be filled in."""
        return cls(
            np.zeros(tokens, np.int64),
            np.zeros(tokens, np.float32),
            np.zeros((tokens, k), np.int64),
            np.full((tokens, k), -np.inf, np.float32),  # where the vocabulary is smaller still
        )

    def fill(self, start: int, part: "PromptLogprobs") -> None:
        """In place, from row `start` on; of the part's likeliest as many as there is room for."""
        rows = slice(start, start + len(part.ids))
        self.ids[rows], self.chosen[rows] = part.ids, part.chosen
        k = min(self.top.shape[1], part.top.shape[1])
        self.top_ids[rows, :k], self.top[rows, :k] = part.top_ids[:, :k], part.top[:, :k]


def encoded_bytes(tokens: int, k: int) -> int:
    """Of the scores of so many tokens, with k of the likeliest each, as a message; at most."""
    return tokens * (16 + 7 * k)


class Opening(NamedTuple):
    """`cached_tokens` of the prompt were computed already when it was admitted. `prompt_logprobs`
    are of all its tokens but the first, where they were asked for."""

    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
