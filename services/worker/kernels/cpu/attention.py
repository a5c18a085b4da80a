"""Paged attention on a CPU that reads the blocks in place, without gathering contexts.

Decode rows and short prompt chunks are computed in one call per layer (decode_loops.py): each token
is a query with a table and a position. A longer chunk is a matrix product: prefill_loops.py
computes it on a processor with wide vectors, else PyTorch's attention (the reference kernels).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.kernels.cpu import decode_loops, prefill_loops
from services.worker.kernels.cpu.codegen.vectors import LANES
from services.worker.kernels.cpu.number_formats import Numbers, as_numpy
from services.worker.kernels.cpu.threads import numba_threads, wide_vectors
from services.worker.kernels.interface import AttentionOptions
from services.worker.kernels.reference.attention import ChunkGroup, TorchAttention
from services.worker.kernels.reference.paging import LARGEST_SCALE, TINY
from services.worker.kv.cache import KVLayer
from services.worker.requests.types.batch import DecodeRows, Ints, PrefillChunk, StepBatch

# Longest chunk that is computed as rows, if longer ones go to prefill_loops.py, and if they go to
# PyTorch (measured).
MAX_ROW_TOKENS, MAX_ROW_TOKENS_BEFORE_TORCH = 7, 48
THREAD_WORK = 250_000  # multiplications of a layer from which another thread saves time
SCALE_BOUNDS = (np.float32(TINY), np.float32(LARGEST_SCALE))
NO_SCALES = np.zeros((0, 0, 0, 0), np.float32)

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens computed by decode_loops.py. Each has the number of its table (`owners`), its position
    in its sequence, and its index in the packed batch (`places`)."""

    tables: Ints
    owners: Ints
    positions: Ints
    places: Ints

    @classmethod
    def from_batch(cls, decodes: DecodeRows, chunks: list[tuple[int, PrefillChunk]]) -> "_Rows":
        """All decodes, and each token of `chunks`, given with their first index in the packed
        batch. Without chunks, the arrays are views of those of the decodes, and advance with
        them."""
        count = len(decodes)
        each = np.arange(count)
        if not chunks:
            return cls(decodes.tables, each, decodes.positions, each)
        width = max(decodes.tables.shape[1], *(len(chunk.table) for _, chunk in chunks))
        tables = np.zeros((count + len(chunks), width), np.int64)
        tables[:count, : decodes.tables.shape[1]] = decodes.tables
        for number, (_, chunk) in enumerate(chunks):
            tables[count + number, : len(chunk.table)] = chunk.table
        counts = np.array([chunk.tokens for _, chunk in chunks])
        within = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        starts = np.array([chunk.start for _, chunk in chunks])
        firsts = np.array([first for first, _ in chunks])
        return cls(
            tables,
            np.concatenate([each, np.arange(count, len(tables)).repeat(counts)]),
            np.concatenate([decodes.positions, starts.repeat(counts) + within]),
            np.concatenate([each, firsts.repeat(counts) + within]),
        )


class _Span(NamedTuple):
    """Positions [start, end) of a long chunk. Its tokens begin at index `place` of the packed
    batch."""

    table: Ints
    start: int
    end: int
    place: int


class NumbaAttention:
    """AttentionKernels on a CPU, for float32 and bfloat16, native or INT8."""

    def __init__(
        self,
        block_tokens: int,
        dtype: torch.dtype,
        token_bytes: int = 512,
        threads: int = 0,
        tiles: bool | None = None,
    ):
        """`threads` is the limit; 0: PyTorch's number. `tiles`: whether long chunks use
        prefill_loops.py; None: if vectors are wide."""
        self._tiles = wide_vectors() if tiles is None else tiles
        self._torch = TorchAttention(block_tokens, torch.device("cpu"), dtype, token_bytes)
        self._threads = min(threads or torch.get_num_threads(), numba_threads())
        self._layers: dict[int, tuple[Numbers, Floats]] = {}
        self._decodes: DecodeRows | None = None
        self._rows = _Rows.from_batch(DecodeRows([], [], block_tokens), [])
        self._work = 0  # sum of the positions of all rows
        self._slots = np.zeros(0, np.int64)
        self._long: list[tuple[slice, ChunkGroup]] = []
        self._tiled: list[_Span] = []

    def prepare(self, batch: StepBatch, slots: Tensor) -> None:
        decodes = batch.decodes
        self._slots = slots.numpy()
        self._long, self._tiled = [], []
        if not batch.chunks:
            if decodes is not self._decodes or decodes.tables is not self._rows.tables:
                self._rows = _Rows.from_batch(decodes, [])
            self._decodes = decodes
        else:
            self._rows = _Rows.from_batch(decodes, self._short(batch))
            self._decodes = None
        self._work = int(self._rows.positions.sum())

    def _short(self, batch: StepBatch) -> list[tuple[int, PrefillChunk]]:
        """The chunks to compute as rows, with their first index in the packed batch. Records the
        other chunks."""
        short, first = [], len(batch.decodes)
        most = MAX_ROW_TOKENS if self._tiles else MAX_ROW_TOKENS_BEFORE_TORCH
        for chunk in batch.chunks:
            if chunk.tokens <= most or chunk.drafts:  # a draft's results are those of decodes
                short.append((first, chunk))
            elif self._tiles:
                self._tiled.append(_Span(np.asarray(chunk.table), chunk.start, chunk.end, first))
            else:
                rows = slice(first, first + chunk.tokens)
                self._long.append((rows, ChunkGroup(self._torch, chunk, first)))
            first += chunk.tokens
        return short

    def store(self, layer: KVLayer, k: Tensor, v: Tensor) -> None:
        data, scales = self._views(layer)
        for side, x in enumerate(as_numpy(given.contiguous()) for given in (k, v)):
            if layer.scales is None:
                decode_loops.store(data[side], self._slots, x)
            else:
                decode_loops.store_int8(data[side], scales[side], self._slots, x, *SCALE_BOUNDS)

    def attend(
        self, layer: KVLayer, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions
    ) -> Tensor:
        out, queries = torch.empty(q.shape, dtype=torch.float32), q.float().contiguous()
        if len(self._rows.positions):
            self._attend(layer, queries, out, options, self._threads_for(q, self._work))
        for span in self._tiled:
            seen = (span.start + span.end + 1) // 2  # keys per query, on average
            pairs = (span.end - span.start) * min(seen, options.window or seen)
            threads = self._threads_for(q, pairs)
            self._attend_span(layer, queries, out, options, threads, span)
        for rows, group in self._long:
            out[rows] = group.attend(layer, q, k, v, options)
        return out if q.dtype is torch.float32 else out.to(q.dtype)

    def warm(self, layer: KVLayer, dtype: torch.dtype) -> None:
        """Compiles the kernels for such layers, or loads them from disk, so that no step waits."""
        nothing = torch.zeros(0, layer.data.shape[2], layer.data.shape[4], dtype=dtype)
        self.store(layer, nothing, nothing)
        none = _Span(np.zeros(0, np.int64), 0, 0, 0)
        arguments = layer, nothing.float(), nothing.float(), AttentionOptions(1.0)
        for threads in {1, self._threads}:
            self._attend(*arguments, threads)
        if self._tiles:
            self._attend_span(*arguments, 1, none)

    def _attend(
        self, layer: KVLayer, q: Tensor, out: Tensor, options: AttentionOptions, threads: int
    ) -> None:
        rows = self._rows
        tile = math.gcd(layer.data.shape[3], LANES)
        attend = decode_loops.attention(q.shape[2], tile, threads > 1)
        if threads > 1:
            numba.set_num_threads(threads)  # a setting of the calling thread
        attend(
            *self._views(layer),
            rows.tables,
            rows.owners,
            rows.positions,
            rows.places,
            q.numpy(),
            out.numpy(),
            *_numbers(options),
        )

    def _attend_span(
        self,
        layer: KVLayer,
        q: Tensor,
        out: Tensor,
        options: AttentionOptions,
        threads: int,
        span: _Span,
    ) -> None:
        numba.set_num_threads(threads)  # a setting of the calling thread
        data, scales = self._views(layer)
        scale, window, softcap = _numbers(options)
        prefill_loops.attend(
            data,
            scales,
            span.table,
            span.start,
            span.end,
            span.place,
            q.numpy(),
            out.numpy(),
            scale,
            window,
            softcap,
            threads,
        )

    def _threads_for(self, q: Tensor, pairs: int) -> int:
        """Threads for this many (query token, key token) pairs: one for little work, at most
        PyTorch's own number, which reflects the cores available to this worker."""
        together = pairs * q.shape[1] * q.shape[2] > THREAD_WORK
        return min(self._threads, torch.get_num_threads()) if together else 1

    def _views(self, layer: KVLayer) -> tuple[Numbers, Floats]:
        """A layer's blocks as arrays for the loops; kept, because the memory does not move."""
        key = layer.data.data_ptr()
        if key not in self._layers:
            scales = NO_SCALES if layer.scales is None else layer.scales.numpy()
            self._layers[key] = (as_numpy(layer.data), scales)
        return self._layers[key]


def _numbers(options: AttentionOptions) -> tuple[np.float32, int, np.float32]:
    """Scale, window and soft-cap as the loops take them; 0: none."""
    softcap = np.float32(options.softcap or 0.0)
    return np.float32(options.scale), options.window or 0, softcap
