"""The swapper: bytes arrive at the right places in any order that the device permits."""

from collections.abc import Callable
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from services.costs import Direction
from services.worker.kernels.reference.blocks import TorchBlocks
from services.worker.kv.cache import KVLayer
from services.worker.kv.copies import StagedLayer
from services.worker.kv.device_streams import ImmediateStreams
from services.worker.kv.host_cache import HostCache
from services.worker.kv.staging import RecordLayout, RingSize
from services.worker.kv.swapper import Swapper
from services.worker.kv.transfers import KVTransfer, TransferPlan
from tests.worker.kv.deferred_streams import DeferredCopies, DeferredStreams, Missing
from tests.worker.kv.swap_drill import (
    BLOCK,
    DEVICE_BLOCKS,
    LAYOUTS,
    Drill,
    empty_layers,
    holds,
    random_layers,
    there_and_back,
    write,
)

NATIVE = LAYOUTS["native"]
PLENTY = 2**40
TWO_OF_TWO = RingSize(2, 2)


# Order


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_swapper_preserves_every_byte_with_deferred_streams(layout, seed):
    drill = Drill(seed, layout)
    assert drill.run() == []
    assert len(timings := drill.swapper.pop_timings()) == drill.finished
    assert all(timing.elapsed_s > 0 for timing in timings)


@pytest.mark.parametrize("missing", Missing)
def test_missing_wait_corrupts(missing):
    """Without this, the test above would prove nothing."""
    assert any(Drill(seed, NATIVE, missing).run() for seed in range(60))


# One swapper, by hand


class Bench:
    """A swapper on the CPU; work completes when it is issued."""

    def __init__(self, layout: RecordLayout = NATIVE, ring: RingSize = TWO_OF_TWO):
        self.layout = layout
        self.layers = empty_layers(layout, DEVICE_BLOCKS)
        self.swapper = self.make(layout, ring)

    def make(self, layout: RecordLayout, ring: RingSize) -> Swapper:
        return Swapper(
            self.layers, TorchBlocks(), layout, host_for(layout), ImmediateStreams(), ring
        )

    def put(self, blocks: list[int], seed: int):
        content = random_layers(self.layout, len(blocks), Random(seed))
        write(self.layers, blocks, content)
        return content

    def start(self, *moves: KVTransfer, recalled: tuple[int, ...] = ()) -> list[str]:
        return self.swapper.start(TransferPlan(moves, recalled))

    def finish(self) -> list[int]:
        """Serials of all uploads, after they have settled."""
        settled = []
        while self.swapper.busy:
            self.swapper.wait()
            settled += self.swapper.settle()
        return settled


class LazyBench(Bench):
    """No copy runs before it is awaited."""

    def make(self, layout: RecordLayout, ring: RingSize) -> Swapper:
        self.streams = DeferredStreams(Random(0), haste=(0.0,))
        copies = DeferredCopies(TorchBlocks(), self.streams)
        return Swapper(self.layers, copies, layout, host_for(layout), self.streams, ring)

    def finish(self) -> list[int]:
        settled = super().finish()
        self.streams.finish_all()
        return settled


def host_for(layout: RecordLayout) -> HostCache:
    return HostCache(12, layout.record_bytes, lambda: PLENTY)


def move(serial, direction, device, host, tokens=None) -> KVTransfer:
    tokens = len(device) * BLOCK if tokens is None else tokens
    return KVTransfer(serial, f"r{serial}", direction, tuple(device), tuple(host), tokens)


def offload(serial, device, host, tokens=None) -> KVTransfer:
    return move(serial, Direction.OFFLOAD, device, host, tokens)


def upload(serial, device, host, tokens=None) -> KVTransfer:
    return move(serial, Direction.UPLOAD, device, host, tokens)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_request_longer_than_the_ring_with_a_partial_block(layout):
    bench = Bench(layout, RingSize(1, 2))
    tokens = 4 * BLOCK + 1
    content = bench.put([3, 1, 4, 0, 5], seed=1)
    bench.start(offload(1, [3, 1, 4, 0, 5], [0, 1, 2, 7, 6], tokens))
    bench.put(list(range(DEVICE_BLOCKS)), seed=2)
    bench.start(upload(2, [9, 8, 2, 6, 7], [0, 1, 2, 7, 6], tokens))
    assert bench.finish() == [2]
    expected = there_and_back(layout, content, tokens)
    assert holds(bench.layers, [9, 8, 2, 6, 7], expected, tokens)
    if not layout.swap_int8 or layout.kv_int8:
        assert holds(bench.layers, [9, 8, 2, 6, 7], content, tokens)


def test_uploads_settle_in_order_when_complete():
    bench = LazyBench(ring=RingSize(1, 1))
    bench.put([0, 1, 2], seed=1)
    bench.start(offload(1, [0, 1], [0, 1]), offload(2, [2], [2]))
    bench.start(upload(3, [4, 5], [0, 1]), upload(4, [6], [2]))
    assert bench.swapper.busy
    bench.swapper.wait()
    assert bench.swapper.settle() == [], "only the first of two blocks has arrived"
    assert bench.finish() == [3, 4]
    assert not bench.swapper.busy
    bench.swapper.wait()
    assert bench.swapper.settle() == []


@pytest.mark.parametrize("settled_chunks", [0, 1])
def test_recalled_upload_is_not_scattered(settled_chunks):
    bench = LazyBench(ring=RingSize(2, 1))
    bench.put([0, 1, 2], seed=1)
    bench.start(offload(1, [0, 1, 2], [0, 1, 2]))
    bench.start(upload(2, [4, 5, 6], [0, 1, 2]), upload(3, [7], [1]))
    for _ in range(settled_chunks):
        bench.swapper.wait()
        bench.swapper.settle()
    bench.start(offload(4, [8], [0]), recalled=(2,))  # the host block of 2 is reused at once
    bench.streams.finish_all()
    owner = bench.put([4, 5, 6], seed=2)
    assert bench.finish() == [3]
    assert holds(bench.layers, [4, 5, 6], owner, 3 * BLOCK)


def test_upload_recalled_before_its_start_never_starts():
    bench = Bench()
    bench.put([0], seed=1)
    owner = bench.put([4], seed=2)
    bench.start(offload(1, [0], [0]), upload(2, [4], [0]), recalled=(2,))
    assert not bench.swapper.busy
    assert holds(bench.layers, [4], owner, BLOCK)


def test_recall_of_a_settled_or_unknown_upload_changes_nothing():
    bench = Bench()
    content = bench.put([0], seed=1)
    bench.start(offload(1, [0], [0]), upload(2, [4], [0]))
    bench.finish()
    bench.start(recalled=(2, 77))
    assert holds(bench.layers, [4], content, BLOCK)


def test_reset_drops_uploads_and_later_ones_arrive():
    bench = LazyBench(ring=RingSize(2, 1))
    content = bench.put([0, 1, 2], seed=1)
    bench.start(offload(1, [0, 1, 2], [0, 1, 2]), upload(2, [4, 5, 6], [0, 1, 2]))
    bench.swapper.wait()
    bench.swapper.settle()
    bench.swapper.reset()
    assert not bench.swapper.busy
    bench.streams.finish_all()
    owner = bench.put([4, 5, 6], seed=2)
    bench.start(upload(1, [7, 8, 9], [0, 1, 2]))  # serials may restart
    assert bench.finish() == [1]
    assert holds(bench.layers, [4, 5, 6], owner, 3 * BLOCK)
    assert holds(bench.layers, [7, 8, 9], content, 3 * BLOCK)


def test_empty_upload_settles():
    bench = Bench()
    bench.start(upload(1, [], [], tokens=0))
    assert bench.swapper.busy
    assert bench.finish() == [1]
    assert bench.swapper.pop_timings() == []


def test_mismatched_transfer_is_refused():
    with pytest.raises(ValueError, match="5 tokens needs 2 blocks; it has 1 device and 1 host"):
        Bench().start(offload(1, [0], [0], tokens=BLOCK + 1))


class FailsOnce(TorchBlocks):
    """Its first scatter raises an out-of-memory error."""

    failed = False

    def scatter(self, layer: KVLayer, blocks: Tensor, staged: StagedLayer) -> None:
        if not self.failed:
            self.failed = True
            raise torch.OutOfMemoryError("no memory for a scatter")
        super().scatter(layer, blocks, staged)


def test_failing_kernel_keeps_its_slot():
    bench, host = Bench(), host_for(NATIVE)
    swapper = Swapper(bench.layers, FailsOnce(), NATIVE, host, ImmediateStreams(), RingSize(1, 1))
    content = bench.put([0, 1], seed=1)
    swapper.start(TransferPlan((offload(1, [0, 1], [0, 1]), upload(2, [4, 5], [0, 1]))))
    with pytest.raises(torch.OutOfMemoryError):
        swapper.settle()
    swapper.reset()
    swapper.start(TransferPlan((upload(3, [4, 5], [0, 1]),)))
    assert swapper.settle() == [3]
    assert holds(bench.layers, [4, 5], content, 2 * BLOCK)


def test_timings_report_completed_transfers_once():
    bench = Bench()
    bench.put([0, 1, 2], seed=1)
    bench.start(offload(1, [0, 1, 2], [0, 1, 2], tokens=9))
    bench.start(upload(2, [4, 5, 6], [0, 1, 2], tokens=9), upload(3, [7], [0]), recalled=(3,))
    bench.finish()
    timings = bench.swapper.pop_timings()
    assert [(t.direction, t.tokens) for t in timings] == [
        (Direction.OFFLOAD, 9),
        (Direction.UPLOAD, 9),
    ]
    assert all(timing.elapsed_s > 0 for timing in timings)
    assert bench.swapper.pop_timings() == []


def test_timings_wait_for_the_copy():
    bench = LazyBench()
    bench.start(offload(1, [0], [0]))
    assert bench.swapper.pop_timings() == []
    bench.streams.finish_all()
    assert [t.tokens for t in bench.swapper.pop_timings()] == [BLOCK]


def test_offload_without_host_memory_is_lost_and_others_continue():
    bench = Bench()
    small = HostCache(8, NATIVE.record_bytes, _once(), slab_bytes=2 * NATIVE.record_bytes)
    swapper = Swapper(
        bench.layers, TorchBlocks(), NATIVE, small, ImmediateStreams(), RingSize(1, 1)
    )
    content = bench.put([0, 1], seed=1)
    again = KVTransfer(9, "r2", Direction.UPLOAD, (7,), (2,), BLOCK)
    moves = TransferPlan((offload(1, [0, 1], [0, 1]), offload(2, [2], [2]), again))
    assert swapper.start(moves) == ["r2"]
    assert not swapper.busy, "lost KV is not uploaded"
    swapper.start(TransferPlan((upload(3, [4, 5], [0, 1]),)))
    assert swapper.settle() == [3]
    assert holds(bench.layers, [4, 5], content, 2 * BLOCK)


def _once() -> Callable[[], int]:
    """Free memory for one slab."""
    free_bytes = [PLENTY]
    return lambda: free_bytes.pop() if free_bytes else 0
