"""The pool of queued requests as columns, and the batches made of it: the vocabulary of all
cuts."""

from dataclasses import dataclass

import numpy as np

from services.costs import CostModel
from services.forecast import Floats, Ints
from services.policies.snapshot import Bools, WorkerSnapshot, stable_order, whole_blocks


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens of every candidate: `length`, the prefill (prompt and existing output); `max_output`,
    the largest output that a batch must hold for it; `expected`, the expected output within
    that."""

    length: Ints
    max_output: Ints
    expected: Ints


@dataclass(frozen=True, slots=True)
class Room:
    """The capacity of one batch: `tokens` of KV, all padded to the longest request, in whole
    blocks; and `slots`."""

    tokens: float
    slots: int
    block_tokens: int
    cost: CostModel

    @staticmethod
    def for_worker(worker: WorkerSnapshot, share: float, batch_size: int) -> "Room":
        """A share of the worker's KV, and its number of slots if limited."""
        slots = min(worker.max_running, batch_size)
        return Room(share * worker.kv_tokens, slots, worker.block_tokens, worker.cost)

    def max_batch_size(self, length: Ints, max_output: int) -> Ints:
        """N_max (SCLS, Eq. 8): how many requests of this length and output fit together; at least
        one."""
        many: Ints = (self.tokens // self._blocks(length + max_output)).astype(np.int64)
        return np.clip(many, 1, max(1, self.slots))

    def fits_each(self, size: Ints, length: Ints, max_output: Ints) -> Bools:
        """Whether each batch fits: (length + max_output) · size ≤ tokens (SCLS, Eq. 5 and 9;
        Magnus, Eq. 5). A single request always fits, because no other batch would hold it."""
        enough = size * self._blocks(length + max_output) <= self.tokens
        fits: Bools = ((size == 1) | enough) & (size <= self.slots)
        return fits

    def fits(self, size: int, length: int, max_output: int) -> bool:
        """The same for one batch."""
        each = -(-(length + max_output) // self.block_tokens) * self.block_tokens
        return size <= self.slots and (size == 1 or size * each <= self.tokens)

    def _blocks(self, tokens: Ints) -> Ints:
        return whole_blocks(tokens, self.block_tokens)


@dataclass(frozen=True)
class Batches:
    """Batches in columns, ascending by id: the candidate positions of each, the most urgent first,
    with the columns of the papers' formulas."""

    ids: Ints
    members: Ints
    starts: Ints
    size: Ints
    length: Ints
    max_output: Ints
    expected: Ints

    @staticmethod
    def group(at: Ints, ids: Ints, sizes: Sizes) -> "Batches":
        """`ids`, parallel to the ascending positions `at`, name each one's batch. O(n), or
        O(n log n) where the ids differ by more than 65,535."""
        order = stable_order(ids)
        members, sorted_ids = at[order], ids[order]
        begins = np.ones(len(ids), bool)
        np.not_equal(sorted_ids[1:], sorted_ids[:-1], out=begins[1:])
        starts = begins.nonzero()[0]

        def largest(column: Ints) -> Ints:
            return np.maximum.reduceat(column[members], starts) if len(starts) else column[:0]

        size = np.empty_like(starts)
        size[:-1], size[-1:] = starts[1:] - starts[:-1], len(members) - starts[-1:]
        lengths = largest(sizes.length), largest(sizes.max_output), largest(sizes.expected)
        return Batches(sorted_ids[starts], members, starts, size, *lengths)

    def __len__(self) -> int:
        return len(self.ids)

    def members_of(self, nth: int) -> Ints:
        """The positions in a batch, the most urgent first."""
        start = int(self.starts[nth])
        return self.members[start : start + int(self.size[nth])]

    def first_values(self, column: Ints) -> Ints:
        """For each batch, the value of its most urgent member."""
        return column[self.members[self.starts]]

    def min_values(self, column: Floats) -> Floats:
        """For each batch, the least value of its members."""
        if not len(self):
            return column[:0]
        least: Floats = np.minimum.reduceat(column[self.members], self.starts)
        return least
