"""Low-rank changes of linear maps by the adapters of a batch's rows.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022), §4.1: h = W x + B A x ·
α / r. The base product W x is computed once for all rows. Rows of one adapter are a group, and each
group adds its own B A x, as in Punica (Chen et al., MLSys 2024, §4).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.kv.device_streams import to_device

Ints = NDArray[np.int64]
LARGE_ROWS = 16  # of a group for which a library's product is the fastest on a CPU
NO_SLOT = -1  # of a row without an adapter


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one adapter: adjacent ones as a slice, else their indices on the device."""

    slot: int
    rows: slice | Tensor


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """The rows of a packed batch that have an adapter, grouped by its slot.

    The same on the device, int64: `rows` [adapted rows] in the order of the groups, `starts`
    [groups + 1] in them, and `group_slots` [groups]. `largest` is the size of a group.

    The same for a CPU: `large` groups have at least LARGE_ROWS; `few_rows` and `few_slots` are the
    rows of the others, and the slot of each."""

    groups: Sequence[RowGroup]
    rows: Tensor
    starts: Tensor
    group_slots: Tensor
    largest: int
    large: Sequence[RowGroup]
    few_rows: Ints
    few_slots: Ints

    @classmethod
    def by_slot(cls, slots: Ints, device: torch.device) -> "AdapterRows | None":
        """`slots` has the slot of each row, or NO_SLOT; None if no row has one. O(rows log
        rows)."""
        order = slots.argsort(kind="stable")
        order = order[np.searchsorted(slots[order], 0) :]
        if not len(order):
            return None
        found = slots[order]
        starts = np.append(np.flatnonzero(np.diff(found, prepend=NO_SLOT)), len(order))
        rows = to_device(order, device)
        groups = [
            RowGroup(int(found[start]), _adjacent(order[start:end]) or rows[start:end])
            for start, end in pairwise(starts.tolist())
        ]
        sizes = np.diff(starts)
        few = np.repeat(sizes < LARGE_ROWS, sizes)
        large = [groups[at] for at in np.flatnonzero(sizes >= LARGE_ROWS).tolist()]
        return cls(
            groups,
            rows,
            to_device(starts, device),
            to_device(found[starts[:-1]], device),
            int(sizes.max()),
            large,
            order[few],
            found[few],
        )


def _adjacent(rows: Ints) -> slice | None:
    """Ascending rows as a slice, if none is between them."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else None


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of a step: of all its tokens, and of the rows that need logits."""

    tokens: AdapterRows | None
    logits: AdapterRows | None


class LowRankMap:
    """The adapters of one linear map, by slot. Maps with the same input that are joined to one have
    several parts, each with outputs of its own.

    `down` [slots, parts · rank, in] and `up` [slots, rank, out]; `up` includes the scaling. The
    rows of a slot that are in use come first: `ranks[slot]` for each part, 0 without an adapter.
    `parts[slot]` are those that the slot's adapter changes. All are written between two steps.
    """

    def __init__(
        self,
        slots: int,
        rank: int,
        inputs: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.inputs, self.widths = inputs, tuple(widths)
        # Written now, so that the memory counts as used when the KV cache is sized.
        shape = slots, len(widths) * rank, inputs
        self.down = torch.empty(shape, dtype=dtype, device=device).zero_()
        self.up = torch.empty(slots, rank, sum(widths), dtype=dtype, device=device).zero_()
        self.ranks: Ints = np.zeros(slots, np.int64)
        self.device_ranks = torch.zeros(slots, dtype=torch.int64, device=device)
        self.parts: list[Sequence[int]] = [()] * slots
        self.part_widths: Ints = np.array(widths, np.int64)

    @property
    def outputs(self) -> int:
        return int(self.up.shape[2])

    @property
    def most_rank(self) -> int:
        """The largest rank of a slot."""
        return int(self.ranks.max())

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.itemsize for part in (self.down, self.up))

    def columns(self, part: int) -> slice:
        """The outputs of a part."""
        start = sum(self.widths[:part])
        return slice(start, start + self.widths[part])

    def set(self, slot: int, parts: dict[int, tuple[Tensor, Tensor]]) -> None:
        """Stores A [rank, in] and the transpose of the scaled B [out, rank] of each part that the
        adapter changes. Does not wait for the device if they are in pinned memory."""
        self.clear(slot)
        if not parts:
            return
        rank = max(len(down) for down, _ in parts.values())
        for part, (down, up) in parts.items():
            start = part * rank
            self.down[slot, start : start + len(down)].copy_(down, non_blocking=True)
            self.up[slot, : len(up), self.columns(part)].copy_(up, non_blocking=True)
        self.ranks[slot] = self.device_ranks[slot] = rank
        self.parts[slot] = tuple(sorted(parts))

    def clear(self, slot: int) -> None:
        self.ranks[slot] = self.device_ranks[slot] = 0
        self.parts[slot] = ()
        self.down[slot].zero_()
        self.up[slot].zero_()


class LowRankProducts(Protocol):
    """Adds the products of a batch's adapters."""

    def add(self, change: LowRankMap, out: Tensor, x: Tensor, rows: AdapterRows) -> None:
        """out[row] += x[row] · down · up of the row's slot, in place. x [rows, in], out [rows,
        out]."""
