"""Swapper: carries out moves between the device's blocks and host memory, beside compute.

An offload is gather (compute: blocks → slot), then copy (copy lane: slot → host). An upload is
copy (host → slot), then, once that has arrived, scatter (compute: slot → blocks). Longer ones go
through the staging slots chunk by chunk. What is touched by which lane, and what orders it:

    device blocks   compute only: gathers, scatters and the model's kernels, in order of issue.
                    So a block may be given away as soon as its gather is issued, and read as
                    soon as its scatter is. A recalled upload's scatter is never issued.
    host blocks     the copy lane only, in order of issue. Those of an upload stay its own until
                    it has settled or is recalled: its later chunks are not issued at once.
    outgoing slots  compute writes, copy reads: copy waits for the gather (event `gathered`),
                    the next gather for the copy (`slot.reusable`).
    incoming slots  copy writes, compute reads: the scatter is issued once the copy was seen to
                    have passed (`arrived`), the next copy waits for the scatter
                    (`slot.reusable`). A recalled chunk's slot has no scatter to wait for: its
                    next copy comes after the old one on the same lane.
    index tensors   made and read on compute, freed to its allocator.
"""

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.costs import Direction, SwapTiming
from services.worker.kv.cache import KVLayer
from services.worker.kv.copies import BlockCopies
from services.worker.kv.device_streams import Event, Lane, Streams, to_device
from services.worker.kv.host_cache import HostCache
from services.worker.kv.staging import RecordLayout, RingSize, Slot, StagingRing
from services.worker.kv.swap_clock import SwapTimer, TransferTimer
from services.worker.kv.transfers import KVTransfer, TransferPlan


@dataclass(frozen=True, slots=True)
class CopyChunk:
    """What fits into a slot: blocks [first, end) of a move."""

    move: KVTransfer
    first: int
    end: int
    watch: TransferTimer

    @property
    def device_blocks(self) -> Sequence[int]:
        return self.move.device_blocks[self.first : self.end]

    @property
    def host_blocks(self) -> Sequence[int]:
        return self.move.host_blocks[self.first : self.end]

    @property
    def is_last(self) -> bool:
        return self.end == len(self.move.device_blocks)


@dataclass(frozen=True, slots=True)
class Upload:
    """An upload's chunk on its way into `slot`; there once `arrived` has passed."""

    chunk: CopyChunk
    slot: Slot
    arrived: Event


class Swapper:
    """Moves between `layers` and `host`. Called by the engine's thread, between two steps.

    All but index tensors and events is allocated at construction. A move costs O(its blocks)
    and a kernel for each layer and chunk, and a copy for each run of host blocks.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer],
        copies: BlockCopies,
        layout: RecordLayout,
        host: HostCache,
        streams: Streams,
        ring: RingSize,
    ):
        self._layers = layers
        self._copies = copies
        self._block_tokens = layout.block_tokens
        self._host = host
        self._streams = streams
        self._slot_blocks = ring.slot_blocks
        self._device = layers[0].data.device
        self._outgoing = StagingRing(layout, ring, streams, self._device)
        self._incoming = StagingRing(layout, ring, streams, self._device)
        self._waiting: deque[CopyChunk] = deque()  # for a slot; at most the device's blocks
        self._uploads: deque[Upload] = deque()  # in order of arrival; at most the slots
        self._clock = SwapTimer(streams)

    @property
    def block_bytes(self) -> int:
        """Of a block at rest."""
        return self._host.record_bytes

    @property
    def busy(self) -> bool:
        """Whether uploads are under way: call `settle` until they are not."""
        return bool(self._uploads or self._waiting)

    def start(self, moves: TransferPlan) -> list[str]:
        """Recall, then issue each move in order; waits for nothing.

        What is computed from now on may overwrite the blocks of an offload. It must leave those
        of an upload alone until `settle` has named it, and its host blocks too. An upload that
        is recalled in the same breath never starts. Returns the requests whose offload host
        memory could not take: their KV is lost. Raises ValueError for a move whose blocks and
        tokens don't match.
        """
        recalled = frozenset(moves.recalled)
        if recalled:
            self._forget(recalled)
        lost: list[str] = []
        for move in moves.started:
            if move.serial in recalled or move.request_id in lost:
                continue
            if move.direction is Direction.UPLOAD:
                self._upload(move)
            elif not self._offload(move):
                lost.append(move.request_id)
        return lost

    def settle(self) -> list[int]:
        """Scatter what has arrived, without waiting for more. Serials of the uploads that may
        be read by whatever is computed from now on, in the order they were started.

        If a kernel raises, no upload under way can be relied on any more: `reset`.
        """
        settled = []
        while self._uploads and self._uploads[0].arrived.query():
            upload = self._uploads.popleft()
            self._scatter(upload.chunk, upload.slot)
            if upload.chunk.is_last:
                settled.append(upload.chunk.move.serial)
            self._fill()
        return settled

    def wait(self) -> None:
        """Return once `settle` can get on; at once when no upload is under way."""
        if self._uploads:
            self._uploads[0].arrived.synchronize()

    def reset(self) -> None:
        """Give up all uploads: nothing more is written to their blocks."""
        for upload in self._uploads:
            self._incoming.give(upload.slot)
        self._uploads.clear()
        self._waiting.clear()

    def take_timings(self) -> list[SwapTiming]:
        """Of the moves finished since the last call; the device's time, waits left out."""
        return self._clock.take()

    def _offload(self, move: KVTransfer) -> bool:
        """False, with nothing issued, where host memory can't be had."""
        if not self._host.ensure(max(move.host_blocks) + 1):
            return False
        watch = TransferTimer(move.direction, move.tokens, move.request_id)
        for chunk in self._chunks(move, watch):
            slot = self._outgoing.turn()
            self._gather(chunk, slot)
            self._to_host(chunk, slot)
        self._clock.follow(watch)
        return True

    def _upload(self, move: KVTransfer) -> None:
        watch = TransferTimer(move.direction, move.tokens, move.request_id)
        self._waiting.extend(self._chunks(move, watch))
        self._fill()

    def _chunks(self, move: KVTransfer, watch: TransferTimer) -> Iterator[CopyChunk]:
        """At least one, so that a move of nothing (all of it was shared) settles like others."""
        blocks = -(-move.tokens // self._block_tokens)
        if not blocks == len(move.device_blocks) == len(move.host_blocks):
            raise ValueError(
                f"{move.direction} {move.serial} of {move.tokens} tokens: "
                f"{len(move.device_blocks)} device blocks, {len(move.host_blocks)} host blocks"
            )
        for first in range(0, max(1, blocks), self._slot_blocks):
            yield CopyChunk(move, first, min(first + self._slot_blocks, blocks), watch)

    def _gather(self, chunk: CopyChunk, slot: Slot) -> None:
        """Blocks → slot, on compute; the copy lane goes on once that is done."""
        self._streams.wait(Lane.COMPUTE, slot.reusable)
        started = self._streams.record(Lane.COMPUTE)
        blocks, filled = self._index(chunk.device_blocks, self._filled(chunk))
        for layer, staged in zip(self._layers, slot.first(len(blocks)), strict=True):
            self._copies.gather(layer, blocks, filled, staged)
        gathered = self._streams.record(Lane.COMPUTE)
        chunk.watch.add(Lane.COMPUTE, started, gathered)
        self._streams.wait(Lane.COPY, gathered)

    def _to_host(self, chunk: CopyChunk, slot: Slot) -> None:
        started = self._streams.record(Lane.COPY)
        for first, records in self._host.runs(chunk.host_blocks):
            self._streams.copy(records, slot.records[first : first + len(records)])
        slot.reusable = self._streams.record(Lane.COPY)
        chunk.watch.add(Lane.COPY, started, slot.reusable)

    def _fill(self) -> None:
        """Send waiting uploads on as far as there are slots."""
        while self._waiting and self._incoming:
            self._uploads.append(self._from_host(self._waiting.popleft(), self._incoming.take()))

    def _from_host(self, chunk: CopyChunk, slot: Slot) -> Upload:
        self._streams.wait(Lane.COPY, slot.reusable)
        started = self._streams.record(Lane.COPY)
        for first, records in self._host.runs(chunk.host_blocks):
            self._streams.copy(slot.records[first : first + len(records)], records)
        arrived = self._streams.record(Lane.COPY)
        chunk.watch.add(Lane.COPY, started, arrived)
        return Upload(chunk, slot, arrived)

    def _scatter(self, chunk: CopyChunk, slot: Slot) -> None:
        """Slot → blocks, on compute; its copy has passed."""
        started = self._streams.record(Lane.COMPUTE)
        try:
            self._scatter_layers(chunk.device_blocks, slot)
        finally:  # the slot is in the ring again whatever happens
            slot.reusable = self._streams.record(Lane.COMPUTE)
            self._incoming.give(slot)
        chunk.watch.add(Lane.COMPUTE, started, slot.reusable)
        if chunk.is_last:
            self._clock.follow(chunk.watch)

    def _scatter_layers(self, device_blocks: Sequence[int], slot: Slot) -> None:
        if not device_blocks:
            return
        (blocks,) = self._index(device_blocks)
        for layer, staged in zip(self._layers, slot.first(len(blocks)), strict=True):
            self._copies.scatter(layer, blocks, staged)

    def _forget(self, serials: Container[int]) -> None:
        """Give up these uploads as far as they are under way; their slots are free at once."""
        self._waiting = deque(c for c in self._waiting if c.move.serial not in serials)
        uploads, self._uploads = self._uploads, deque()
        for upload in uploads:
            if upload.chunk.move.serial in serials:
                self._incoming.give(upload.slot)
            else:
                self._uploads.append(upload)
        self._fill()

    def _filled(self, chunk: CopyChunk) -> list[int]:
        """Tokens in each block."""
        tokens, size = chunk.move.tokens, self._block_tokens
        return [min(size, tokens - i * size) for i in range(chunk.first, chunk.end)]

    def _index(self, *values: Sequence[int]) -> tuple[Tensor, ...]:
        return to_device(np.array(values, np.int64), self._device).unbind()
