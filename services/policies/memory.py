"""Policy memory between rounds: frozen, so that a replay is exact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from services.forecast import Floats, Ints


@dataclass(frozen=True)
class MemoryColumns:
    """Columns with one value for each remembered request: `rows` are their board rows, each once,
    and `serials` their names, since rows are reused. Any other request reads 0. Immutable."""

    values: Mapping[str, Floats] = field(default_factory=dict)
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    serials: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    @cached_property
    def _places(self) -> Ints:
        """By board row, where its values are; any place for a row without values."""
        places = np.zeros(int(self.rows.max(initial=0)) + 1, np.int64)
        places[self.rows] = np.arange(len(self.rows))
        return places

    @cached_property
    def _last(self) -> list[Ints]:
        """Rows, serials, and what `_find` answered; empty before the first call."""
        return []

    def __reduce__(self) -> tuple[type["MemoryColumns"], tuple[object, ...]]:
        """Copies hold no derived places, so that equal columns have equal bytes."""
        return MemoryColumns, (self.values, self.rows, self.serials)

    def recall(self, names: Sequence[str], rows: Ints, serials: Ints) -> list[Floats]:
        """The stored values of these requests, one column per name; 0 for unseen ones. Copies."""
        if not len(self.rows) or not len(rows):
            return [np.zeros(len(rows)) for _ in names]
        at, unseen = self._find(rows, serials)
        return [self._recall(name, at, unseen) for name in names]

    def _find(self, rows: Ints, serials: Ints) -> tuple[Ints, Ints]:
        """The places of these requests, and which of them are unseen. The last answer is kept,
        because an order recalls its columns in several calls."""
        last = self._last
        if last and last[0] is rows and last[1] is serials:
            return last[2], last[3]
        at = self._places[np.minimum(rows, len(self._places) - 1)]
        unseen = ((self.serials[at] != serials) | (self.rows[at] != rows)).nonzero()[0]
        last[:] = rows, serials, at, unseen
        return at, unseen

    def _recall(self, name: str, at: Ints, unseen: Ints) -> Floats:
        if name not in self.values:
            return np.zeros(len(at))
        column = self.values[name][at]
        column[unseen] = 0.0
        return column

    def merged(self, rows: Ints, serials: Ints, values: Mapping[str, Floats]) -> "MemoryColumns":
        """Values for these requests, in addition to those of others. O(remembered)."""
        if not len(rows) or not values:
            return self
        absent = [name for name in self.values if name not in values]
        fresh = {**values, **dict(zip(absent, self.recall(absent, rows, serials), strict=True))}
        is_other = np.ones(int(max(rows.max(), self.rows.max(initial=0))) + 1, bool)
        is_other[rows] = False
        others = is_other[self.rows].nonzero()[0]
        if not len(others):
            return MemoryColumns(fresh, rows, serials)
        kept = {name: self._recall(name, others, others[:0]) for name in fresh}
        return MemoryColumns(
            {name: np.concatenate([kept[name], column]) for name, column in fresh.items()},
            np.concatenate([self.rows[others], rows]),
            np.concatenate([self.serials[others], serials]),
        )


@dataclass(frozen=True)
class PolicyMemory:
    """Global numbers, the order's columns for each queued or running request (`ranks`), and the
    arrangement's columns (`notes`)."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    ranks: MemoryColumns = field(default_factory=MemoryColumns)
    notes: MemoryColumns = field(default_factory=MemoryColumns)

    def number(self, name: str, default: float = 0.0) -> float:
        return self.numbers.get(name, default)

    def recall(self, names: Sequence[str], rows: Ints, serials: Ints) -> list[Floats]:
        """The order's columns."""
        return self.ranks.recall(names, rows, serials)

    def with_numbers(self, **numbers: float) -> "PolicyMemory":
        if not numbers:
            return self
        return PolicyMemory({**self.numbers, **numbers}, self.ranks, self.notes)

    def with_columns(self, rows: Ints, serials: Ints, **columns: Floats) -> "PolicyMemory":
        """A copy with these as the order's columns, which it keeps; other requests are
        forgotten."""
        return PolicyMemory(self.numbers, MemoryColumns(columns, rows, serials), self.notes)

    def with_notes(self, rows: Ints, serials: Ints, notes: Mapping[str, Floats]) -> "PolicyMemory":
        if not notes:
            return self
        return PolicyMemory(self.numbers, self.ranks, self.notes.merged(rows, serials, notes))
