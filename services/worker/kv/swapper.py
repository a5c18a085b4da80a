"""Swapper: transfers KV between device blocks and host memory, concurrently with compute.

An offload gathers blocks into a slot (compute lane), then copies the slot to the host (copy lane).
An upload copies from the host to a slot (copy lane) and, once that has arrived, scatters the slot
to blocks (compute lane). Long transfers pass through the slots in chunks. These rules order the
accesses of the two lanes:

    device blocks   Only the compute lane accesses them: gathers, scatters and the model's kernels,
                    in order of issue. A block may be reallocated once its gather is issued, and
                    read once its scatter is issued. The scatter of a recalled upload is not issued.
    host blocks     Only the copy lane accesses them, in order of issue. An upload keeps its host
                    blocks until it settles or is recalled, because later chunks are issued later.
    outgoing slots  Compute writes, copy reads. The copy waits for the gather (event `gathered`),
                    the next gather waits for the copy (`slot.reusable`).
    incoming slots  Copy writes, compute reads. The scatter is issued after the copy has passed
                    (`arrived`), and the next copy waits for the scatter (`slot.reusable`). The slot
                    of a recalled chunk has no scatter: its next copy follows the old one on the
                    same lane.
    index tensors   Created and read on the compute lane, and freed to its allocator.
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
from services.worker.kv.swap_clock import SwapClock, TransferTimer
from services.worker.kv.transfers import KVTransfer, TransferPlan


@dataclass(frozen=True, slots=True)
class CopyChunk:
    """Part of a transfer that fits into one slot: its blocks [first, end)."""

    move: KVTransfer
    first: int
    end: int
    timer: TransferTimer

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
    """A chunk of an upload, being copied to `slot`; complete once `arrived` has passed."""

    chunk: CopyChunk
    slot: Slot
    arrived: Event


class Swapper:
    """Transfers KV between `layers` and `host`. Called by the engine's thread between two steps.

    Allocates everything but index tensors and events at construction. A transfer costs O(blocks),
    one kernel per layer and chunk, and one copy per run of contiguous host blocks.
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
        self._waiting: deque[CopyChunk] = deque()  # for a slot; bounded by the device's blocks
        self._uploads: deque[Upload] = deque()  # in order of arrival; bounded by the slots
        self._clock = SwapClock(streams)

    @property
    def busy(self) -> bool:
        """Whether uploads are in progress; call `settle` until this is False."""
        return bool(self._uploads or self._waiting)

    def start(self, moves: TransferPlan) -> list[str]:
        """Cancels the recalled uploads, then issues each transfer in order. Does not block.

        Later compute may overwrite the device blocks of an offload. It must not access the device
        or host blocks of an upload until `settle` returns its serial. An upload that the same plan
        recalls never starts. Returns the requests with an offload that found no host memory: their
        KV is lost. Raises ValueError for a transfer with blocks and tokens that do not match.
        """
        recalled = frozenset(moves.recalled)
        if recalled:
            self._cancel(recalled)
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
        """Scatters arrived chunks; does not wait for others. Returns the serials of the completed
        uploads, in the order they were started. Later compute may read their blocks.

        If a kernel raises, no upload in progress is valid any more: call `reset`.
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
        """Blocks until `settle` can make progress; returns at once without uploads."""
        if self._uploads:
            self._uploads[0].arrived.synchronize()

    def reset(self) -> None:
        """Cancels all uploads: nothing more is written to their blocks."""
        for upload in self._uploads:
            self._incoming.push(upload.slot)
        self._uploads.clear()
        self._waiting.clear()

    def pop_timings(self) -> list[SwapTiming]:
        """Returns the device time of the transfers finished since the last call, without waits."""
        return self._clock.pop_finished()

    def _offload(self, move: KVTransfer) -> bool:
        """Returns False, with nothing issued, if host memory cannot be allocated."""
        if not self._host.ensure(max(move.host_blocks) + 1):
            return False
        timer = TransferTimer(move.direction, move.tokens, move.request_id)
        for chunk in self._chunks(move, timer):
            slot = self._outgoing.rotate()
            self._gather(chunk, slot)
            self._to_host(chunk, slot)
        self._clock.add(timer)
        return True

    def _upload(self, move: KVTransfer) -> None:
        timer = TransferTimer(move.direction, move.tokens, move.request_id)
        self._waiting.extend(self._chunks(move, timer))
        self._fill()

    def _chunks(self, move: KVTransfer, timer: TransferTimer) -> Iterator[CopyChunk]:
        """Yields at least one chunk, so that an empty transfer (all blocks shared) settles, too."""
        blocks = -(-move.tokens // self._block_tokens)
        if not blocks == len(move.device_blocks) == len(move.host_blocks):
            raise ValueError(
                f"{move.direction} {move.serial} of {move.tokens} tokens needs {blocks} blocks; it "
                f"has {len(move.device_blocks)} device and {len(move.host_blocks)} host blocks"
            )
        for first in range(0, max(1, blocks), self._slot_blocks):
            yield CopyChunk(move, first, min(first + self._slot_blocks, blocks), timer)

    def _gather(self, chunk: CopyChunk, slot: Slot) -> None:
        """Copies blocks to the slot on the compute lane; the copy lane waits for it."""
        self._streams.wait(Lane.COMPUTE, slot.reusable)
        started = self._streams.record(Lane.COMPUTE)
        blocks, filled = self._index(chunk.device_blocks, self._filled(chunk))
        for layer, staged in zip(self._layers, slot.first(len(blocks)), strict=True):
            self._copies.gather(layer, blocks, filled, staged)
        gathered = self._streams.record(Lane.COMPUTE)
        chunk.timer.add(Lane.COMPUTE, started, gathered)
        self._streams.wait(Lane.COPY, gathered)

    def _to_host(self, chunk: CopyChunk, slot: Slot) -> None:
        started = self._streams.record(Lane.COPY)
        for first, records in self._host.runs(chunk.host_blocks):
            self._streams.copy(records, slot.records[first : first + len(records)])
        slot.reusable = self._streams.record(Lane.COPY)
        chunk.timer.add(Lane.COPY, started, slot.reusable)

    def _fill(self) -> None:
        """Issues waiting chunks while slots are free."""
        while self._waiting and self._incoming:
            self._uploads.append(self._from_host(self._waiting.popleft(), self._incoming.pop()))

    def _from_host(self, chunk: CopyChunk, slot: Slot) -> Upload:
        self._streams.wait(Lane.COPY, slot.reusable)
        started = self._streams.record(Lane.COPY)
        for first, records in self._host.runs(chunk.host_blocks):
            self._streams.copy(slot.records[first : first + len(records)], records)
        arrived = self._streams.record(Lane.COPY)
        chunk.timer.add(Lane.COPY, started, arrived)
        return Upload(chunk, slot, arrived)

    def _scatter(self, chunk: CopyChunk, slot: Slot) -> None:
        """Copies the slot to its blocks on the compute lane, after its upload arrived."""
        started = self._streams.record(Lane.COMPUTE)
        try:
            self._scatter_layers(chunk.device_blocks, slot)
        finally:  # return the slot to the ring even on an error
            slot.reusable = self._streams.record(Lane.COMPUTE)
            self._incoming.push(slot)
        chunk.timer.add(Lane.COMPUTE, started, slot.reusable)
        if chunk.is_last:
            self._clock.add(chunk.timer)

    def _scatter_layers(self, device_blocks: Sequence[int], slot: Slot) -> None:
        if not device_blocks:
            return
        (blocks,) = self._index(device_blocks)
        for layer, staged in zip(self._layers, slot.first(len(blocks)), strict=True):
            self._copies.scatter(layer, blocks, staged)

    def _cancel(self, serials: Container[int]) -> None:
        """Cancels these uploads if in progress; frees their slots at once."""
        self._waiting = deque(c for c in self._waiting if c.move.serial not in serials)
        uploads, self._uploads = self._uploads, deque()
        for upload in uploads:
            if upload.chunk.move.serial in serials:
                self._incoming.push(upload.slot)
            else:
                self._uploads.append(upload)
        self._fill()

    def _filled(self, chunk: CopyChunk) -> list[int]:
        """Returns the number of tokens in each block of the chunk."""
        tokens, size = chunk.move.tokens, self._block_tokens
        return [min(size, tokens - i * size) for i in range(chunk.first, chunk.end)]

    def _index(self, *values: Sequence[int]) -> tuple[Tensor, ...]:
        return to_device(np.array(values, np.int64), self._device).unbind()
