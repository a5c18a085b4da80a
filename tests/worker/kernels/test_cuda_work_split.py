"""The division of attention into thread blocks: every key of every row once, and enough of them to
fill the device."""

import numpy as np
import pytest
import torch

from benchmarks.gpu.checks import Case, layout_of
from services.worker.kernels.cuda.tile_sizes import (
    decode_tiles,
    power_of_two,
    prefill_tiles,
    require_supported,
)
from services.worker.kernels.cuda.work_split import count_splits, list_items, list_tiles
from services.worker.kernels.selection import kernels_for
from services.worker.kv.cache import KVShape


def test_single_long_sequence_fills_the_device():
    splits = count_splits(np.array([1_000_000]), None, 64, 8, 132)
    assert splits[0] * 8 >= 132 * 8


def test_short_rows_are_not_split():
    assert count_splits(np.array([200, 64, 1]), None, 64, 1, 132).tolist() == [1, 1, 1]


def test_full_batch_is_split_only_as_needed():
    splits = count_splits(np.full(512, 2048), None, 64, 8, 132)
    assert splits.tolist() == [4] * 512 or splits.sum() * 8 <= 2 * 16 * 132


def test_positions_hidden_by_a_window_are_no_work():
    lengths = np.array([100_000, 500])
    assert count_splits(lengths, 256, 64, 8, 132).max() <= 2


def test_work_items_name_each_split_once():
    items, ranges = list_items(np.array([3, 1, 2]))
    assert items.tolist() == [[0, 0, 3], [0, 1, 3], [0, 2, 3], [1, 0, 1], [2, 0, 2], [2, 1, 2]]
    assert ranges.tolist() == [[0, 3], [3, 1], [4, 2]]


def test_chunk_tiles_cover_every_query_once_longest_context_first():
    case = Case("", ((5, 1), (0, 21), (50, 9), (3, 40)), 4, 2, 32)
    layout = layout_of(case, torch.Generator().manual_seed(1))
    chunks = layout.batch.chunks
    tiles, blocks = list_tiles(chunks, 1, 16)
    assert tiles.dtype == blocks.dtype == np.int32
    assert tiles[:, 1].tolist() == sorted(tiles[:, 1].tolist(), reverse=True)
    covered = [row for row, _, tokens, _ in tiles for row in range(row, row + tokens)]
    assert sorted(covered) == list(range(1, 1 + 21 + 9 + 40))
    by_row = {row: (position, table) for row, position, _, table in tiles.tolist()}
    starts = [1, 22, 31]
    for chunk, row in zip(chunks, starts, strict=True):
        position, table = by_row[row]
        assert position == chunk.start
        assert blocks[table : table + len(chunk.table)].tolist() == chunk.table.tolist()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "sentence"),
    [
        (4, 4, 16, torch.float16, "not 16"),
        (4, 4, 512, torch.float16, "not 512"),
        (4, 4, 64, torch.float64, "float64"),
        (6, 4, 64, torch.float16, "6 query heads and 4 key heads"),
        (1024, 1, 64, torch.float16, "at most 256"),
    ],
)
def test_unsupported_shape_is_a_sentence(heads, kv_heads, head_dim, dtype, sentence):
    with pytest.raises(ValueError, match=sentence):
        kernels_for(
            torch.device("cpu"), 16, dtype, [KVShape(kv_heads, head_dim)], [heads], chosen="triton"
        )


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 100, 128, 160, 192, 256])
def test_all_heads_from_32_to_256_have_tiles(head_dim):
    require_supported(32, 8, head_dim)
    for dtype in (torch.float32, torch.bfloat16):
        for stored in (dtype, torch.int8):
            tiles = decode_tiles(4, head_dim, dtype, stored)
            shared_bytes = 4 * tiles.keys * power_of_two(head_dim) * stored.itemsize
            assert tiles.queries >= 16 <= tiles.keys and shared_bytes <= 96 * 1024
        assert prefill_tiles(head_dim, dtype.itemsize).keys >= 16
