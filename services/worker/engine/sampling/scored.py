"""Log-probabilities of prompt tokens, for rows that request them, copied to the host like drawn
tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.kv.device_streams import to_device
from services.worker.requests.types.batch import PrefillChunk
from services.worker.requests.types.prompt import MAX_LOGPROBS
from services.worker.requests.types.scores import Ids, PromptLogprobs

SLICE = 256  # rows whose float32 probabilities exist at once


class PromptScores(NamedTuple):
    """`ids` are the scored tokens of the chunks, in order. `copies` arrive on the host with the
    step's tokens: their logprobs, the most likely ids and their logprobs. The same number for
    every row, so that ties do not depend on other rows."""

    ids: Sequence[Ids]
    copies: Sequence[Tensor]

    @classmethod
    @torch.inference_mode()
    def from_logits(cls, chunks: Sequence[PrefillChunk], logits: Tensor) -> "PromptScores":
        """From their logits [Σ scored, vocabulary], a slice at a time. Does not wait."""
        ids = [_scored(chunk) for chunk in chunks]
        wanted = to_device(np.concatenate(ids), logits.device)[:, None]
        asked = any(_asked(chunk) for chunk in chunks)
        width = min(MAX_LOGPROBS, logits.shape[-1]) if asked else 0
        parts = [
            _logprobs(logits[first : first + SLICE], wanted[first : first + SLICE], width)
            for first in range(0, len(wanted), SLICE)
        ]
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        return cls(ids, [x.to("cpu", non_blocking=True) for x in columns])

    def to_host(self) -> list[PromptLogprobs]:
        """Call after the drawn tokens of the step are on the host."""
        ends = np.cumsum([len(ids) for ids in self.ids])[:-1]
        chosen, top_ids, top = (np.split(x.numpy(), ends) for x in self.copies)
        return [
            PromptLogprobs(*parts) for parts in zip(self.ids, chosen, top_ids, top, strict=True)
        ]


def _logprobs(logits: Tensor, wanted: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    raw = logits.float().log_softmax(-1)
    best = raw.topk(width)
    return raw.gather(-1, wanted)[:, 0], best.indices, best.values


def _scored(chunk: PrefillChunk) -> Ids:
    first = chunk.start + 1
    return np.array(chunk.sequence.tokens[first : first + chunk.scored], np.int64)


def _asked(chunk: PrefillChunk) -> int:
    return chunk.sequence.prompt.sampling.prompt_logprobs or 0
