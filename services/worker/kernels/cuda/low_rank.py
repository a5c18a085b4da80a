"""Low-rank products of a batch's adapters in Triton: two launches for each map, and one more for
each further part."""

import torch
from torch import Tensor

from services.worker.kernels.cuda.device import INTERPRETED, contiguous_rows, require_runnable
from services.worker.kernels.cuda.low_rank_tiles import expand, shrink
from services.worker.kernels.cuda.tile_sizes import power_of_two
from services.worker.kernels.low_rank import AdapterRows, LowRankMap

ROWS = 16  # the fewest that a tensor core multiplies
INPUTS, COLUMNS = 64, 64
MAX_RANKS = 64  # of a tile


class TritonLowRank:
    """LowRankProducts on a CUDA device; on the CPU under TRITON_INTERPRET=1. Written from Triton's
    documentation and tested in its interpreter. Calls do not wait for the device."""

    def __init__(self, device: torch.device):
        require_runnable(device)

    def add(self, change: LowRankMap, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        if not (rank := change.most_rank):
            return
        x, parts = contiguous_rows(x), len(change.widths)
        low = torch.empty(len(rows.rows), parts * rank, dtype=torch.float32, device=x.device)
        ranks = change.device_ranks
        # The interpreter multiplies bfloat16 as integers.
        exact = x.dtype is torch.float32 or INTERPRETED
        tiles = -(-rows.largest // ROWS)
        tile = max(16, min(MAX_RANKS, power_of_two(parts * rank)))
        shrink[(len(rows.groups), tiles, -(-parts * rank // tile))](
            x, change.down, low, rows.rows, rows.starts, rows.group_slots, ranks,
            change.inputs, x.stride(0), *change.down.stride()[:2], low.stride(0),
            PARTS=parts, ROWS=ROWS, RANKS=tile, INPUTS=INPUTS, EXACT=exact,
        )  # fmt: skip
        tile = max(16, min(MAX_RANKS, power_of_two(rank)))
        for part, width in enumerate(change.widths):
            expand[(len(rows.groups), tiles, -(-width // COLUMNS))](
                low, change.up, out, rows.rows, rows.starts, rows.group_slots, ranks,
                part, change.columns(part).start, width, low.stride(0),
                *change.up.stride()[:2], out.stride(0),
                ROWS=ROWS, RANKS=tile, COLUMNS=COLUMNS, EXACT=exact,
            )  # fmt: skip
