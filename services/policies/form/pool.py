"""Those who wait as columns, and the batches they are put into: what every cut speaks."""

from dataclasses import dataclass

import numpy as np

from services.costs import CostModel
from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, WorkerSnapshot


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of every row of a contest, in tokens: `length`, what is prefilled of it (its prompt and the
    output that is there); `makes`, the most output that a batch must hold for it; `expected`, what
    it is expected to make of that."""

    length: Ints
    makes: Ints
    expected: Ints


@dataclass(frozen=True, slots=True)
class Room:
    """What one batch may take of a worker: `tokens` of KV, all of it padded to the longest, in
    whole blocks; and `places`."""

    tokens: float
    places: int
    block_tokens: int
    cost: CostModel

    @staticmethod
    def for_worker(worker: WorkerSnapshot, share: float, most: int) -> "Room":
        """A share of its KV, and so many at once if it has the places."""
        places = min(worker.max_running, most)
        return Room(share * worker.kv_tokens, places, worker.block_tokens, worker.cost)

    def most(self, length: Ints, makes: int) -> Ints:
        """How many of such a length and such a make at once: N_max (papers/003 Eq. 8), one at
        least."""
        many: Ints = (self.tokens // self._blocks(length + makes)).astype(np.int64)
        return np.clip(many, 1, max(1, self.places))

    def holds(self, size: Ints, length: Ints, makes: Ints) -> Bools:
        """(length + makes) · size ≤ tokens (papers/003 Eq. 5 and 9, papers/004 Eq. 5). One alone is
        taken whatever it needs: no other batch would hold it."""
        enough = size * self._blocks(length + makes) <= self.tokens
        fits: Bools = ((size == 1) | enough) & (size <= self.places)
        return fits

    def takes(self, size: int, length: int, makes: int) -> bool:
        """The same of one batch."""
        each = -(-(length + makes) // self.block_tokens) * self.block_tokens
        return size <= self.places and (size == 1 or size * each <= self.tokens)

    def _blocks(self, tokens: Ints) -> Ints:
        return -(-tokens // self.block_tokens) * self.block_tokens


@dataclass(frozen=True)
class Batches:
    """Batches side by side, ascending by id: the contest's positions that are in each, the most
    urgent first, with the columns that the paper's formulas take."""

    ids: Ints
    members: Ints
    starts: Ints
    size: Ints
    length: Ints
    makes: Ints
    expected: Ints

    @staticmethod
    def group(at: Ints, ids: Ints, sizes: Sizes) -> "Batches":
        """`ids`, parallel to the positions `at`, say who is in which. O(n log n)."""
        order = np.lexsort((at, ids))
        members, sorted_ids = at[order], ids[order]
        starts = np.flatnonzero(np.diff(sorted_ids, prepend=-1))

        def most(column: Ints) -> Ints:
            return np.maximum.reduceat(column[members], starts) if len(starts) else column[:0]

        size = np.diff(starts, append=len(members))
        lengths = most(sizes.length), most(sizes.makes), most(sizes.expected)
        return Batches(sorted_ids[starts], members, starts, size, *lengths)

    def __len__(self) -> int:
        return len(self.ids)

    def members_of(self, nth: int) -> Ints:
        """The positions in it, the most urgent first."""
        start = int(self.starts[nth])
        return self.members[start : start + int(self.size[nth])]

    def first_values(self, column: Ints) -> Ints:
        """Of each batch the value of its most urgent member."""
        return column[self.members[self.starts]]

    def min_values(self, column: Floats) -> Floats:
        """Of each batch the least of its members'."""
        if not len(self):
            return column[:0]
        least: Floats = np.minimum.reduceat(column[self.members], self.starts)
        return least
