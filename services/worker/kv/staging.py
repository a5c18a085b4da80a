"""Staging: how a block rests in host memory, and the device's buffers it passes through."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from services.worker.kv.cache import KVShape
from services.worker.kv.copies import StagedLayer
from services.worker.kv.device_streams import Event, Lane, Streams

ALIGNMENT_BYTES = 16  # the widest load a GPU thread makes


@dataclass(frozen=True, slots=True)
class Segment:
    """One tensor of a record: `shape` of one block, at `offset_bytes`."""

    offset_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def data_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def view(self, records: Tensor) -> Tensor:
        """[n, *shape] inside `records` [n, record_bytes] uint8."""
        raw = records[:, self.offset_bytes : self.offset_bytes + self.data_bytes]
        return raw.view(self.dtype).view(len(records), *self.shape)


@dataclass(frozen=True)
class RecordLayout:
    """One block in host memory, a record: layer after layer its data and what scales it.

    An INT8 cache (`kv_int8`) rests as it is, float32 scales beside it; a native one as it is,
    or with `swap_int8` quantized, its ranges in `dtype` beside it. Every segment, and so every
    record, starts at a multiple of 16 bytes.
    """

    shapes: tuple[KVShape, ...]
    block_tokens: int
    dtype: torch.dtype  # native: what the model computes in
    kv_int8: bool = False
    swap_int8: bool = False

    @property
    def exact(self) -> bool:
        """Whether what rests comes back bit for bit."""
        return self.kv_int8 or not self.swap_int8

    @property
    def record_bytes(self) -> int:
        last = self._segments()[-1][-1]
        return _aligned(last.offset_bytes + last.data_bytes)

    def layer_views(self, records: Tensor) -> list[StagedLayer]:
        """Each layer of `records` [n, record_bytes] uint8, as views; n may be anything."""
        return [self._staged([s.view(records) for s in layer]) for layer in self._segments()]

    def _staged(self, tensors: list[Tensor]) -> StagedLayer:
        data, beside = tensors[0], tensors[1] if len(tensors) > 1 else None
        if self.kv_int8:
            return StagedLayer(data, scales=beside)
        return StagedLayer(data, ranges=beside)

    def _segments(self) -> list[list[Segment]]:
        layers: list[list[Segment]] = []
        end = 0
        for shape in self.shapes:
            layers.append([])
            for segment in self._of_layer(shape):
                layers[-1].append(replace(segment, offset_bytes=end))
                end = _aligned(end + segment.data_bytes)
        return layers

    def _of_layer(self, shape: KVShape) -> Iterator[Segment]:
        rows = (2, shape.kv_heads, self.block_tokens)
        quantized = self.kv_int8 or self.swap_int8
        yield Segment(0, (*rows, shape.head_dim), torch.int8 if quantized else self.dtype)
        if self.kv_int8:
            yield Segment(0, rows, torch.float32)
        elif self.swap_int8:
            yield Segment(0, (2, shape.kv_heads, 2, shape.head_dim), self.dtype)


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


@dataclass(slots=True)
class Slot:
    """Room for a few records on the device. Whoever takes it makes its lane wait for `reusable`:
    what was last done with it on the other lane."""

    records: Tensor
    layers: list[StagedLayer]
    reusable: Event

    def first(self, blocks: int) -> list[StagedLayer]:
        """The views of its first `blocks` records."""
        if blocks == len(self.records):
            return self.layers
        return [_cut(layer, blocks) for layer in self.layers]


def _cut(layer: StagedLayer, blocks: int) -> StagedLayer:
    return StagedLayer(
        layer.data[:blocks],
        layer.scales[:blocks] if layer.scales is not None else None,
        layer.ranges[:blocks] if layer.ranges is not None else None,
    )


@dataclass(frozen=True, slots=True)
class RingSize:
    """`slots` of `slot_blocks` each, once for either direction.

    Two slots let one be copied while the other is filled; all of them together are what can be
    offloaded before compute has to wait for the copies.
    """

    slots: int
    slot_blocks: int

    @classmethod
    def within(cls, staging_bytes: int, record_bytes: int, slots: int = 4) -> "RingSize":
        """The ring of one direction that fits, of one block a slot if nothing does."""
        return cls(slots, max(1, staging_bytes // (slots * record_bytes)))


class StagingRing:
    """Slots in turn, allocated once: no memory is recycled under a pending copy."""

    def __init__(
        self, layout: RecordLayout, size: RingSize, streams: Streams, device: torch.device
    ):
        shape = (size.slots, size.slot_blocks, layout.record_bytes)
        memory = torch.empty(shape, dtype=torch.uint8, device=device)
        # The allocator may have taken this memory from compute that still runs.
        born = streams.record(Lane.COMPUTE)
        self._free = deque(Slot(r, layout.layer_views(r), born) for r in memory.unbind())

    def __bool__(self) -> bool:
        """Whether a slot can be taken."""
        return bool(self._free)

    def take(self) -> Slot:
        """The slot that was given back first. Raises IndexError where none is free."""
        return self._free.popleft()

    def turn(self) -> Slot:
        """The next slot, which stays in turn: for work that is issued whole."""
        self._free.rotate(-1)
        return self._free[-1]

    def give(self, slot: Slot) -> None:
        self._free.append(slot)
