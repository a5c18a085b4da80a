"""A batch as tensors: the model's inputs, in the order of the packed row."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.kv.device_streams import to_device
from services.worker.requests.types.batch import DecodeRows, Ints, PrefillChunk, StepBatch


@dataclass(frozen=True, slots=True)
class Inputs:
    """`tokens`, `positions`, `slots` [Σ tokens]; `rows` whose logits are needed: those that draw a
    token, then those that score a prompt's token. None if all draw."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor | None


class StepInputs:
    """Builds inputs without waiting. On a CPU, the tensors of a batch that only advanced are views
    of its arrays."""

    def __init__(self, device: torch.device):
        self._device = device
        self._rows: DecodeRows | None = None
        self._kept: Inputs | None = None

    def prepare(self, batch: StepBatch, drawn: Tensor | None = None) -> Inputs:
        """`drawn` are the tokens of the step in flight, which rows may read (`DecodeRows.fed`)."""
        inputs = self._mixed(batch) if batch.chunks else self._decoding(batch.decodes)
        fed = batch.decodes.fed
        if fed is None:
            return inputs
        assert drawn is not None, "rows read what no step draws"
        tokens = self._fed(inputs.tokens, fed, drawn)
        return Inputs(tokens, inputs.positions, inputs.slots, inputs.rows)

    def _decoding(self, rows: DecodeRows) -> Inputs:
        if self._kept is None or rows is not self._rows or self._device.type != "cpu":
            self._rows = rows
            self._kept = Inputs(
                self._sent(rows.tokens),
                self._sent(rows.positions),
                self._sent(rows.slots),
                None,
            )
        return self._kept

    def _mixed(self, batch: StepBatch) -> Inputs:
        decodes, chunks = batch.decodes, batch.chunks
        tokens = [_tokens(chunk) for chunk in chunks]
        positions = [np.arange(chunk.start, chunk.end) for chunk in chunks]
        slots = [_slots(chunk, decodes.block_tokens) for chunk in chunks]
        return Inputs(
            self._sent(np.concatenate([decodes.tokens, *tokens])),
            self._sent(np.concatenate([decodes.positions, *positions])),
            self._sent(np.concatenate([decodes.slots, *slots])),
            self._sent(_rows_of_logits(batch)),
        )

    def _fed(self, tokens: Tensor, fed: Ints, drawn: Tensor) -> Tensor:
        """`tokens`, with those of the step in flight for the rows that read them; while the same
        rows decode, that tensor itself. Decode rows come first, so that a row's token has the
        row's index."""
        if len(tokens) == len(fed) == len(drawn) and np.array_equal(fed, np.arange(len(fed))):
            return drawn
        places = np.flatnonzero(fed >= 0)
        into, of = self._sent(np.stack((places, fed[places])))
        return tokens.index_copy(0, into, drawn.index_select(0, of))

    def _sent(self, array: Ints) -> Tensor:
        return to_device(array, self._device)


def _tokens(chunk: PrefillChunk) -> Ints:
    return np.array(chunk.sequence.tokens[chunk.start : chunk.end], np.int64)


def _slots(chunk: PrefillChunk, block_tokens: int) -> Ints:
    positions = np.arange(chunk.start, chunk.end)
    return chunk.table[positions // block_tokens] * block_tokens + positions % block_tokens


def _rows_of_logits(batch: StepBatch) -> Ints:
    decodes = np.arange(len(batch.decodes))
    ends = len(batch.decodes) + np.cumsum([chunk.tokens for chunk in batch.chunks]) - 1
    draws = np.array([chunk.samples for chunk in batch.chunks])
    scores = [
        np.arange(end + 1 - chunk.tokens, end + 1 - chunk.tokens + chunk.scored)
        for end, chunk in zip(ends.tolist(), batch.chunks, strict=True)
        if chunk.scored
    ]
    return np.concatenate([decodes, ends[draws], *scores])
