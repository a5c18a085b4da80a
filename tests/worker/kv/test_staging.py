"""Records, staging rings and host memory: sizes, places, and exhausted memory."""

import pytest
import torch

from services.worker.kv.cache import KVShape
from services.worker.kv.host_cache import HostCache
from services.worker.kv.staging import RecordLayout, RingSize
from tests.worker.kv.swap_drill import LAYOUTS

PLENTY = 2**40


# Records


SMALL = (KVShape(1, 5), KVShape(3, 7))


@pytest.mark.parametrize(
    ("kv_int8", "swap_int8", "layer_bytes"),
    [
        # 3 tokens per block: 2·1·3·5 = 30 and 2·3·3·7 = 126 elements
        (False, False, [64, 256]),  # 60 and 252 bytes
        (False, True, [32 + 48, 128 + 176]),  # ranges of 2·1·2·5·2 = 40 and 2·3·2·7·2 = 168 bytes
        (True, False, [32 + 32, 128 + 80]),  # scales of 2·1·3·4 = 24 and 2·3·3·4 = 72 bytes
        (True, True, [32 + 32, 128 + 80]),  # quantized already
    ],
)
def test_record_size_is_the_sum_of_aligned_parts(kv_int8, swap_int8, layer_bytes):
    layout = RecordLayout(SMALL, 3, torch.bfloat16, kv_int8, swap_int8)
    assert layout.record_bytes == sum(layer_bytes)
    records = torch.zeros(2, layout.record_bytes, dtype=torch.uint8)
    views = layout.layer_views(records)
    for view, shape in zip(views, SMALL, strict=True):
        parts = [view.data, view.scales, view.ranges]
        assert view.data.shape == (2, 2, shape.kv_heads, 3, shape.head_dim)
        assert view.data.dtype == (torch.int8 if kv_int8 or swap_int8 else torch.bfloat16)
        assert (view.scales is not None) == kv_int8
        assert (view.ranges is not None) == (swap_int8 and not kv_int8)
        assert all(
            part[i].data_ptr() % 16 == 0 for part in parts if part is not None for i in (0, 1)
        )
    assert views[1].data.data_ptr() - views[0].data.data_ptr() == layer_bytes[0]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_record_parts_do_not_overlap(layout):
    records = torch.zeros(3, layout.record_bytes, dtype=torch.uint8)
    parts = [
        part
        for view in layout.layer_views(records)
        for part in (view.data, view.scales, view.ranges)
        if part is not None
    ]
    for number, part in enumerate(parts, 1):
        part[1] = number
    assert all(bool((part[1] == number).all()) for number, part in enumerate(parts, 1))
    assert not records[0].any() and not records[2].any()


def test_ring_uses_its_bytes_and_at_least_one_block_per_slot():
    assert RingSize.within(1000, record_bytes=100, slots=4) == RingSize(4, 2)
    assert RingSize.within(10, record_bytes=100, slots=4) == RingSize(4, 1)


# Host memory


def host_of(slab_records: int, blocks: int = 8, free_bytes: int = PLENTY) -> HostCache:
    return HostCache(blocks, 16, lambda: free_bytes, slab_bytes=slab_records * 16)


@pytest.mark.parametrize(
    ("blocks", "runs"),
    [
        ([], []),
        ([2], [(0, [2])]),
        ([0, 1, 2, 3, 4], [(0, [0, 1, 2]), (3, [3, 4])]),  # a slab ends after block 2
        ([1, 0, 4, 5, 7], [(0, [1]), (1, [0]), (2, [4, 5]), (4, [7])]),
    ],
)
def test_host_blocks_are_copied_in_runs_within_a_slab(blocks, runs):
    host = host_of(slab_records=3)
    assert host.ensure(8)
    for block in range(8):
        ((_, record),) = host.runs([block])
        record.fill_(block)
    cut = [(first, records[:, 0].tolist()) for first, records in host.runs(blocks)]
    assert cut == runs
    assert all(records.is_contiguous() for _, records in host.runs(blocks))


def test_host_memory_is_allocated_slab_by_slab():
    host = host_of(slab_records=3)
    assert host.capacity == 0
    assert host.ensure(1) and host.capacity == 3
    assert host.ensure(3) and host.capacity == 3
    assert host.ensure(8) and host.capacity == 8
    assert not host.ensure(9) and not host.refused
    with pytest.raises(IndexError, match="host block 8 of 8 does not exist"):
        list(host.runs([7, 8]))


def test_host_pool_stops_growing_without_free_memory():
    free_bytes = [48, 40, PLENTY]
    host = HostCache(8, 16, lambda: free_bytes.pop(0), slab_bytes=48)
    assert not host.ensure(6)
    assert host.capacity == 3
    assert "free" in host.refused
    assert not host.ensure(4), "a refused pool does not ask again"
    assert host.ensure(3)
    with pytest.raises(ValueError, match="set host_gib lower"):
        host.require()


def test_refused_memory_is_not_an_error_at_run_time():
    host = HostCache(2, 2**60, lambda: 2**61)
    assert not host.ensure(1)
    assert host.refused


def test_required_host_pool_is_allocated_at_start():
    host_of(slab_records=4).require()
