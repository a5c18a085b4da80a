"""Decode steps recorded by batch size and replayed with one launch per step.

A decode step of a small batch is some hundred kernels of a few microseconds each, which the host
launches more slowly than a GPU runs them. Steps of several sizes are therefore recorded at start. A
batch runs at the next larger size. Its padding rows are token 0 at position 0, in a cache block
outside the pool, and attend only to themselves.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter

import torch
from torch import Tensor

from services.worker.engine.graphs.check import (
    SHARED_BLOCKS,
    RandomRows,
    difference,
    random_contexts,
)
from services.worker.engine.graphs.recorder import Recorder
from services.worker.engine.graphs.sizes import next_larger_sizes, recording_order
from services.worker.engine.inputs import Inputs, StepInputs
from services.worker.kernels.interface import RecordableAttention
from services.worker.kv.cache import KVCache
from services.worker.model.paged import PagedModel
from services.worker.model.paged_attention import PagedStep
from services.worker.requests.types.batch import DecodeRows, StepBatch

RECORD_S = 15.0  # no recording begins later, to bound the start

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GraphParts:
    """Inputs of the recording. `pad_block` is a block of the cache outside the pool, `blocks` the
    size of the pool, `limit_bytes` the device memory reserved for all recordings."""

    model: PagedModel
    cache: KVCache
    attention: RecordableAttention
    recorder: Recorder
    sizes: list[int]
    pad_block: int
    blocks: int
    limit_bytes: int


@dataclass
class _Buffers:
    """Inputs and outputs of a recorded step, for the largest number of rows. Rows from `used` on
    are padding. All sizes share them, because logits per size would be too large."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor
    logits: Tensor
    pad_slot: int
    used: int = 0

    @classmethod
    def allocate(cls, rows: int, pad_slot: int, like: Tensor) -> "_Buffers":
        """`like` [·, vocabulary]: logits as the model returns them."""
        zeros = partial(torch.zeros, rows, dtype=torch.long, device=like.device)
        logits = torch.empty(rows, like.shape[-1], dtype=like.dtype, device=like.device)
        return cls(zeros(), zeros(), zeros().fill_(pad_slot), logits, pad_slot)

    def copy_from(self, inputs: Inputs) -> None:
        """Copies the batch's inputs and pads the rest. One launch; four if the batch is smaller
        than the one before."""
        rows = len(inputs.tokens)
        into = [self.tokens[:rows], self.positions[:rows], self.slots[:rows]]
        torch._foreach_copy_(into, [inputs.tokens, inputs.positions, inputs.slots])
        if rows < self.used:
            self.tokens[rows : self.used] = 0
            self.positions[rows : self.used] = 0
            self.slots[rows : self.used] = self.pad_slot
        self.used = rows


@dataclass
class DecodeGraphs:
    """The recorded steps. `run` requires that `accepts` is true, and runs on the engine's
    thread."""

    parts: GraphParts
    buffers: _Buffers
    _replays: dict[int, Callable[[], None]] = field(default_factory=dict)
    _size_by_rows: list[int | None] = field(default_factory=list)

    @classmethod
    def record(cls, parts: GraphParts, eager: Callable[[StepBatch], Tensor]) -> "DecodeGraphs":
        """Records every size with logits that agree with `eager`'s, within the available time and
        memory. Logs the result, and warns about omitted sizes."""
        most, block_tokens = parts.sizes[-1], parts.cache.block_tokens
        blocks = min(parts.blocks, most + SHARED_BLOCKS)  # those that the check uses
        reach = min(parts.attention.row_tokens, parts.model.max_context_tokens)
        rows = RandomRows(blocks, block_tokens, reach, parts.model.vocab_size)
        pad_slot = parts.pad_block * block_tokens
        graphs = cls(parts, _Buffers.allocate(most, pad_slot, eager(rows.batch(1))))
        begun_s, begun_bytes = perf_counter(), parts.recorder.used_bytes()
        with torch.inference_mode(), random_contexts(parts.cache, blocks):
            for tried, size in enumerate(recording_order(parts.sizes)):
                took_s = perf_counter() - begun_s
                # Negative if other memory was freed meanwhile.
                took_bytes = parts.recorder.used_bytes() - begun_bytes
                if tried and (took_s > RECORD_S or took_bytes > parts.limit_bytes):
                    break
                try:
                    graphs._add(size, rows.batch(size), eager)
                except Exception as error:  # any error of the driver, Triton or the model
                    why = " ".join(str(error).split()) or type(error).__name__
                    log.warning("decode steps of %d rows cannot be recorded: %s", size, why)
                    break
        graphs._log_summary(perf_counter() - begun_s, parts.recorder.used_bytes() - begun_bytes)
        return graphs

    def accepts(self, batch: StepBatch) -> bool:
        """Whether a batch has only decodes, and no more or longer ones than were recorded."""
        rows = batch.decodes
        if (
            batch.chunks
            or len(rows) >= len(self._size_by_rows)
            or self._size_by_rows[len(rows)] is None
        ):
            return False
        return int(rows.positions.max()) < self.parts.attention.row_tokens

    def run(self, batch: StepBatch, inputs: Inputs) -> Tensor:
        """Logits [rows, vocabulary], valid until the next run."""
        size = self._size_by_rows[len(batch.decodes)]
        assert size is not None, "run requires accepts"
        self._play(batch, inputs, size, self._replays[size])
        return self.buffers.logits[: len(batch.decodes)]

    @torch.inference_mode()
    def _play(
        self, batch: StepBatch, inputs: Inputs, size: int, replay: Callable[[], None]
    ) -> None:
        self.buffers.copy_from(inputs)
        self.parts.attention.prepare(batch, self.buffers.slots[:size])
        replay()

    def _add(self, size: int, batch: StepBatch, eager: Callable[[StepBatch], Tensor]) -> None:
        """Records a step of `size` rows of padding, and compares its result on `batch` with
        `eager`'s. The batch has as many rows, because a GEMM of fewer rows rounds differently,
        which would look like a fault in half precision."""
        parts, inputs = self.parts, StepInputs(self.parts.model.device)
        empty = StepBatch(DecodeRows([], [], parts.cache.block_tokens), [])
        self.buffers.copy_from(inputs.prepare(empty))
        parts.attention.prepare(empty, self.buffers.slots[:size])
        replay = parts.recorder.record(partial(self._compute, size))
        expected = eager(batch)
        self._play(batch, inputs.prepare(batch), size, replay)
        why = difference(self.buffers.logits[: len(batch.decodes)], expected)
        if why:
            log.warning("decode steps of %d rows run eagerly: %s", size, why)
            return
        self._replays[size] = replay
        self._size_by_rows = next_larger_sizes(list(self._replays), max(self._replays))

    def _compute(self, size: int) -> None:
        """The recorded computation."""
        parts, buffers = self.parts, self.buffers
        positions = buffers.positions[:size]
        parts.attention.begin(positions)
        step = PagedStep(parts.cache, parts.attention)
        logits = parts.model.forward(buffers.tokens[:size], positions, step, None)
        buffers.logits[:size].copy_(logits)

    def _log_summary(self, took_s: float, took_bytes: int) -> None:
        if not self._replays:
            log.warning("no decode step runs as a CUDA graph")
            return
        log.info(
            "decode steps of up to %d rows run as CUDA graphs: %d of %d sizes, recorded in %.1f s, "
            "%d MiB",
            max(self._replays),
            len(self._replays),
            len(self.parts.sizes),
            took_s,
            max(0, took_bytes) >> 20,
        )
