"""Low-rank products in plain PyTorch: two products per group of rows, on any device and dtype."""

from collections.abc import Sequence

from torch import Tensor

from services.worker.kernels.low_rank import AdapterRows, LowRankMap, RowGroup


class TorchLowRank:
    """LowRankProducts by one pair of products for each group and part."""

    def add(self, change: LowRankMap, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        self.add_groups(change, out, x, rows.groups)

    def add_groups(
        self, change: LowRankMap, out: Tensor, x: Tensor, groups: Sequence[RowGroup]
    ) -> None:
        """As `add`, for some of the groups."""
        for group in groups:
            if not (rank := int(change.ranks[group.slot])):
                continue
            down, up = change.down[group.slot], change.up[group.slot, :rank]
            low = x[group.rows] @ down[: len(change.widths) * rank].t()
            for part in change.parts[group.slot]:
                columns = change.columns(part)
                of_part = low[:, part * rank : (part + 1) * rank]
                if isinstance(group.rows, slice):
                    out[group.rows, columns].addmm_(of_part, up[:, columns])
                else:
                    out[:, columns].index_add_(0, group.rows, of_part @ up[:, columns])
