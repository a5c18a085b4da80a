"""Log-probabilities of prompt tokens, copied to the host like drawn tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from services.worker.engine.sampling.drawn import gather_logprobs
from services.worker.kv.device_streams import to_device
from services.worker.requests.types.batch import PrefillChunk
from services.worker.requests.types.scores import Ids, PromptLogprobs

SLICE = 256  # rows that have float32 probabilities at once


class PromptScores(NamedTuple):
    """`ids` are the scored tokens of each chunk. `copies`, as `gather_logprobs` returns them,
    arrive on the host with the step's tokens."""

    ids: Sequence[Ids]
    copies: Sequence[Tensor]

    @classmethod
    @torch.inference_mode()
    def from_logits(cls, chunks: Sequence[PrefillChunk], logits: Tensor) -> "PromptScores":
        """The scores of the chunks from their logits [Σ scored, vocabulary], SLICE rows at a time.
        Does not wait for the device."""
        ids = [_scored(chunk) for chunk in chunks]
        tokens = to_device(np.concatenate(ids), logits.device)[:, None]
        alternatives = any(chunk.sequence.prompt.sampling.prompt_logprobs for chunk in chunks)
        firsts = range(0, len(tokens), SLICE)
        slices = (slice(first, first + SLICE) for first in firsts)
        parts = [gather_logprobs(logits[rows], tokens[rows], alternatives) for rows in slices]
        columns = (torch.cat(column) for column in zip(*parts, strict=True))
        return cls(ids, [x.to("cpu", non_blocking=True) for x in columns])

    def to_host(self) -> list[PromptLogprobs]:
        """Call after the drawn tokens of the step are on the host."""
        ends = np.cumsum([len(ids) for ids in self.ids])[:-1]
        chosen, top_ids, top = (np.split(x.numpy(), ends) for x in self.copies)
        return [
            PromptLogprobs(*parts) for parts in zip(self.ids, chosen, top_ids, top, strict=True)
        ]


def _scored(chunk: PrefillChunk) -> Ids:
    first = chunk.start + 1
    return np.array(chunk.sequence.tokens[first : first + chunk.scored], np.int64)
