"""What policies remember from one round to the next: frozen, so that a replay is exact."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints


@dataclass(frozen=True)
class Memory:
    """Numbers of the whole, and columns of the jobs, one value a board row.

    A row is reused by later jobs: `serials` says whose values stand in it, and whoever else asks
    reads 0. Policies never change a memory, they return the next one.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    columns: Mapping[str, Floats] = field(default_factory=dict)
    serials: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def number(self, name: str, default: float = 0.0) -> float:
        return self.numbers.get(name, default)

    def recall(self, names: Sequence[str], rows: Ints, serials: Ints) -> list[Floats]:
        """What it remembers of these jobs, a column a name; 0 of those it has not seen. Copies."""
        size = len(self.serials)
        if not size or not len(rows):
            return [np.zeros(len(rows)) for _ in names]
        near = np.minimum(rows, size - 1)
        known = (self.serials[near] == serials) & (rows < size)
        return [
            np.where(known, self.columns[name][near], 0.0)
            if name in self.columns
            else np.zeros(len(rows))
            for name in names
        ]

    def with_numbers(self, **numbers: float) -> "Memory":
        return Memory({**self.numbers, **numbers}, self.columns, self.serials)

    def with_columns(self, rows: Ints, serials: Ints, **columns: Floats) -> "Memory":
        """With these values of exactly these jobs; of others nothing is kept. O(board rows)."""
        size = int(rows.max()) + 1 if len(rows) else 0
        owners = np.full(size, -1, np.int64)
        owners[rows] = serials
        kept = {name: _spread(size, rows, values) for name, values in columns.items()}
        return Memory(self.numbers, kept, owners)


def _spread(size: int, rows: Ints, values: Floats) -> Floats:
    spread = np.zeros(size)
    spread[rows] = values
    return spread
