"""Policy memory between rounds: frozen, so that a replay is exact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints


@dataclass(frozen=True)
class MemoryColumns:
    """Columns with one value per board row.

    Rows are reused: `serials` names the request whose values a row holds; any other request reads
    0. Immutable: `merged` returns a copy.
    """

    values: Mapping[str, Floats] = field(default_factory=dict)
    serials: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def recall(self, names: Sequence[str], rows: Ints, serials: Ints) -> list[Floats]:
        """The stored values of these requests, one column per name; 0 for unseen ones. Copies."""
        size = len(self.serials)
        if not size or not len(rows):
            return [np.zeros(len(rows)) for _ in names]
        near = np.minimum(rows, size - 1)
        known = (self.serials[near] == serials) & (rows < size)
        return [
            np.where(known, self.values[name][near], 0.0)
            if name in self.values
            else np.zeros(len(rows))
            for name in names
        ]

    def merged(self, rows: Ints, serials: Ints, values: Mapping[str, Floats]) -> "MemoryColumns":
        """Values for these requests, in addition to those of others. O(board rows)."""
        if not len(rows) or not values:
            return self
        size = max(len(self.serials), int(rows.max()) + 1)
        owners = np.full(size, -1, np.int64)
        owners[: len(self.serials)] = self.serials
        owners[rows] = serials
        kept = {name: _grown(column, size) for name, column in self.values.items()}
        for name in values.keys() | kept.keys():
            column = kept.setdefault(name, np.zeros(size))
            (recalled,) = (values[name],) if name in values else self.recall([name], rows, serials)
            column[rows] = recalled
        return MemoryColumns(kept, owners)


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
        """A copy with these as the order's columns; other requests are forgotten."""
        ranks = MemoryColumns().merged(rows, serials, columns)
        return PolicyMemory(self.numbers, ranks, self.notes)

    def with_notes(self, rows: Ints, serials: Ints, notes: Mapping[str, Floats]) -> "PolicyMemory":
        if not notes:
            return self
        return PolicyMemory(self.numbers, self.ranks, self.notes.merged(rows, serials, notes))


def _grown(values: Floats, size: int) -> Floats:
    grown = np.zeros(size)
    grown[: len(values)] = values
    return grown
