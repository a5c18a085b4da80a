"""Low-rank products on a CPU: groups of a few rows by one call of low_rank_loops.py, others by a
library's products."""

import numba
import torch
from torch import Tensor

from services.worker.kernels.cpu.low_rank_loops import adding
from services.worker.kernels.cpu.number_formats import as_numpy
from services.worker.kernels.cpu.threads import numba_threads
from services.worker.kernels.low_rank import AdapterRows, LowRankMap
from services.worker.kernels.reference.low_rank import TorchLowRank

THREAD_WORK = 500_000  # multiplications above which another thread saves time


class NumbaLowRank(TorchLowRank):
    """LowRankProducts on a CPU, for float32 and bfloat16."""

    def __init__(self) -> None:
        self._threads = numba_threads()

    def add(self, change: LowRankMap, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        if not out.is_contiguous():
            super().add(change, out, x, rows)
            return
        self.add_groups(change, out, x, rows.large)
        if few := len(rows.few_rows):
            numbers = len(change.widths) * change.inputs + change.outputs
            work = few * change.most_rank * numbers
            many = self._threads > 1 and torch.get_num_threads() > 1 and work > THREAD_WORK
            if many:  # a setting of the calling thread
                numba.set_num_threads(min(self._threads, torch.get_num_threads()))
            adding(many)(
                as_numpy(x.contiguous()), as_numpy(change.down), as_numpy(change.up),
                change.part_widths, change.ranks, rows.few_rows, rows.few_slots,
                as_numpy(out),
            )  # fmt: skip

    def warm(self, dtype: torch.dtype) -> None:
        """Compiles the products, or loads them from disk, so that no step waits for it."""
        change = LowRankMap(1, 1, 2, [2], dtype, torch.device("cpu"))
        none = torch.zeros(0, 2, dtype=dtype)
        for many in (False, True):
            adding(many)(
                as_numpy(none), as_numpy(change.down), as_numpy(change.up),
                change.part_widths, change.ranks, change.ranks[:0],
                change.ranks[:0], as_numpy(none.clone()),
            )  # fmt: skip
