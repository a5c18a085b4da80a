"""Converts a batch to the model's input tensors, in the order of the packed row."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.worker.kernels.low_rank import AdapterRows, StepAdapters
from services.worker.kv.device_streams import to_device
from services.worker.model.adapters.pool import AdapterPool
from services.worker.requests.types.batch import DecodeRows, Ints, PrefillChunk, StepBatch


@dataclass(frozen=True, slots=True)
class Inputs:
    """`tokens`, `positions`, `slots` [Σ tokens]. `rows` are those that need logits: rows
    that draw a token, those of drafts last, then rows that score a prompt's token; None if all
    draw."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor | None


class StepInputs:
    """Builds inputs without waiting for the device. On a CPU, the tensors of a batch that only
    advanced are views of its arrays."""

    def __init__(self, device: torch.device):
        self._device = device
        self._rows: DecodeRows | None = None
        self._inputs: Inputs | None = None

    def prepare(self, batch: StepBatch, drawn: Tensor | None = None) -> Inputs:
        """`drawn` are the tokens of the step in flight, which rows may read (`DecodeRows.fed`)."""
        inputs = self._mixed_inputs(batch) if batch.chunks else self._decode_inputs(batch.decodes)
        fed = batch.decodes.fed
        if fed is None:
            return inputs
        assert drawn is not None, "a row reads a token of the step in flight, and there is none"
        tokens = self._insert_drawn(inputs.tokens, fed, drawn)
        return Inputs(tokens, inputs.positions, inputs.slots, inputs.rows)

    def _decode_inputs(self, rows: DecodeRows) -> Inputs:
        if self._inputs is None or rows is not self._rows or self._device.type != "cpu":
            self._rows = rows
            self._inputs = Inputs(
                self._to_device(rows.tokens),
                self._to_device(rows.positions),
                self._to_device(rows.slots),
                None,
            )
        return self._inputs

    def _mixed_inputs(self, batch: StepBatch) -> Inputs:
        decodes, chunks = batch.decodes, batch.chunks
        tokens = list[int]()
        for chunk in chunks:
            tokens += chunk.sequence.tokens[chunk.start : chunk.known_end]
            tokens += chunk.drafts
        counts = np.array([chunk.tokens for chunk in chunks])
        positions = np.array([chunk.start for chunk in chunks]).repeat(counts) + _within(counts)
        slots = _slots(chunks, counts, positions, decodes.block_tokens)
        return Inputs(
            self._to_device(np.concatenate([decodes.tokens, np.array(tokens, np.int64)])),
            self._to_device(np.concatenate([decodes.positions, positions])),
            self._to_device(np.concatenate([decodes.slots, slots])),
            self._to_device(_logit_rows(batch, counts)),
        )

    def _insert_drawn(self, tokens: Tensor, fed: Ints, drawn: Tensor) -> Tensor:
        """`tokens` with those of the step in flight in the rows that read them. While the same rows
        decode, that is `drawn` itself. Decode rows come first, so that a token has the index of its
        row."""
        if len(tokens) == len(fed) == len(drawn) and np.array_equal(fed, np.arange(len(fed))):
            return drawn
        places = np.flatnonzero(fed >= 0)
        into, source = self._to_device(np.stack((places, fed[places])))
        return tokens.index_copy(0, into, drawn.index_select(0, source))

    def _to_device(self, array: Ints) -> Tensor:
        return to_device(array, self._device)


class AdapterInputs:
    """Groups the rows of a batch by adapter. The result is kept while the same rows decode."""

    def __init__(self, pool: AdapterPool, device: torch.device):
        self._pool, self._device = pool, device
        self._rows: DecodeRows | None = None
        self._adapters: StepAdapters | None = None

    def prepare(self, batch: StepBatch) -> StepAdapters | None:
        """None if no row has an adapter. O(tokens) if one is in a slot, else O(1)."""
        if self._pool.is_unplaced:
            self._rows = None
            return None
        if not batch.chunks and batch.decodes is self._rows:
            return self._adapters
        self._rows = None if batch.chunks else batch.decodes
        self._adapters = self._group(batch)
        return self._adapters

    def _group(self, batch: StepBatch) -> StepAdapters | None:
        chunks = batch.chunks
        decodes = np.array([s.adapter_slot for s in batch.decodes.sequences], np.int64)
        counts = np.array([chunk.tokens for chunk in chunks], np.int64)
        in_chunks = np.array([chunk.sequence.adapter_slot for chunk in chunks], np.int64)
        slots = np.concatenate([decodes, in_chunks.repeat(counts)])
        tokens = AdapterRows.by_slot(slots, self._device)
        if tokens is None:
            return None
        if not chunks:
            return StepAdapters(tokens, tokens)
        return StepAdapters(
            tokens, AdapterRows.by_slot(slots[_logit_rows(batch, counts)], self._device)
        )


def _within(counts: Ints) -> Ints:
    """The number of each item in its group, for groups of these sizes."""
    firsts = counts.cumsum() - counts
    return np.arange(counts.sum()) - firsts.repeat(counts)


def _slots(chunks: Seq[PrefillChunk], counts: Ints, positions: Ints, block_tokens: int) -> Ints:
    """The position in the cache of each token of the chunks."""
    blocks = np.concatenate([chunk.table for chunk in chunks])
    widths = np.array([len(chunk.table) for chunk in chunks])
    firsts = (widths.cumsum() - widths).repeat(counts)
    slots: Ints = blocks[firsts + positions // block_tokens] * block_tokens
    return slots + positions % block_tokens


def _logit_rows(batch: StepBatch, counts: Ints) -> Ints:
    """`counts` are the tokens of each chunk."""
    chunks, decodes = batch.chunks, len(batch.decodes)
    ends = decodes + counts.cumsum() - 1
    draws = np.array([chunk.samples for chunk in chunks])
    drafts = np.array([len(chunk.drafts) for chunk in chunks])
    scored = np.array([chunk.scored for chunk in chunks])
    return np.concatenate(
        [
            np.arange(decodes),
            (ends - drafts)[draws],
            (ends + 1 - drafts).repeat(drafts) + _within(drafts),
            (ends + 1 - counts).repeat(scored) + _within(scored),
        ]
    )
