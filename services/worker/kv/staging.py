"""Record layout of a block in host memory, and the staging buffers on the device."""

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
    """Layout of one block in host memory (a record): data and scales, layer by layer.

    An INT8 cache (`kv_int8`) is stored unchanged with its float32 scales; a native one unchanged,
    or with `swap_int8` quantized with its ranges in `dtype`. Every segment, and so every
    record, starts at a multiple of 16 bytes.
    """

    shapes: tuple[KVShape, ...]
    block_tokens: int
    dtype: torch.dtype  # native: what the model computes in
    kv_int8: bool = False
    swap_int8: bool = False

    @property
    def exact(self) -> bool:
        """Whether a round trip through host memory preserves every bit."""
        return self.kv_int8 or not self.swap_int8

    @property
    def record_bytes(self) -> int:
        last = self._segments()[-1][-1]
        return _aligned(last.offset_bytes + last.data_bytes)

    def layer_views(self, records: Tensor) -> list[StagedLayer]:
        """Returns views of each layer of `records` [n, record_bytes] uint8."""
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
    """Buffer for a few records on the device. A new user makes its lane wait for `reusable`, the
    last use of the slot on the other lane."""

    records: Tensor
    layers: list[StagedLayer]
    reusable: Event

    def first(self, blocks: int) -> list[StagedLayer]:
        """Returns views of the first `blocks` records."""
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
    """`slots` buffers of `slot_blocks` each, allocated once per direction.

    Two slots let one be copied while the other is filled. Their total size is what can be
    offloaded before compute waits for copies.
    """

    slots: int
    slot_blocks: int

    @classmethod
    def within(cls, staging_bytes: int, record_bytes: int, slots: int = 4) -> "RingSize":
        """Returns the largest ring within `staging_bytes`, with at least one block per slot."""
        return cls(slots, max(1, staging_bytes // (slots * record_bytes)))


class StagingRing:
    """Slots in round-robin order, allocated once: no memory is freed under a pending copy."""

    def __init__(
        self, layout: RecordLayout, size: RingSize, streams: Streams, device: torch.device
    ):
        shape = (size.slots, size.slot_blocks, layout.record_bytes)
        memory = torch.empty(shape, dtype=torch.uint8, device=device)
        # The allocator may have recycled memory that running compute still uses.
        born = streams.record(Lane.COMPUTE)
        self._free = deque(Slot(r, layout.layer_views(r), born) for r in memory.unbind())

    def __bool__(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free)

    def pop(self) -> Slot:
        """Removes and returns the slot freed longest ago. Raises IndexError if none is free."""
        return self._free.popleft()

    def rotate(self) -> Slot:
        """Returns the next slot and keeps it in the ring: for transfers issued in one go."""
        self._free.rotate(-1)
        return self._free[-1]

    def push(self, slot: Slot) -> None:
        self._free.append(slot)
