"""SeenTokens: which tokens each penalized request has seen, and how often in its output.

The counts are on the device, so that the host need not know a token to count it. A row holds the
distinct tokens of a request instead of a table over the vocabulary: a penalty reads and writes only
those logits.

A row is a cache of its request's `tokens`. It is rebuilt if the length differs (after an eviction,
a move, a resumption or a failed step). When no row is free, the least recently used one is
reassigned, so that the end of a request needs no notification.
"""

from collections import OrderedDict
from collections.abc import Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from services.worker.kv.device_streams import to_device
from services.worker.requests.types.batch import Ints
from services.worker.requests.types.sequence import Sequence

FEWEST_ROWS = 8
STEP = 64  # columns are read in multiples of this, so that shapes stay stable


class SeenTokens:
    """One row per request: its distinct tokens, in the order in which they were first seen."""

    def __init__(self, device: torch.device, vocab_size: int):
        self._device = device
        self._vocab_size = vocab_size
        self._rows: OrderedDict[Sequence, int] = OrderedDict()  # least recently used first
        self._lengths = np.zeros(0, np.int64)  # tokens counted; -1: unknown state
        self._distinct = np.zeros(0, np.int64)  # an upper bound
        self._ids = torch.zeros(0, STEP, dtype=torch.long, device=device)
        self._times = torch.zeros(0, STEP, device=device)
        self._used = torch.zeros(0, dtype=torch.long, device=device)
        self._columns = torch.arange(STEP, device=device)

    def __len__(self) -> int:
        """Number of requests with a row."""
        return len(self._rows)

    @property
    def capacity(self) -> int:
        """Number of rows: fewer than twice the largest number that one step used."""
        return len(self._lengths)

    def clear(self) -> None:
        """Drops all requests."""
        self._rows.clear()
        self._lengths[:] = -1

    def find_rows(self, sequences: Seq[Sequence]) -> Ints:
        """The rows of a step's sequences. O(1) per sequence with a current row; else the row is
        rebuilt in O(its tokens).

        Raises ValueError if a row must be rebuilt and a token of its sequence is unknown.
        """
        for sequence in sequences:
            if sequence in self._rows:
                self._rows.move_to_end(sequence)
        if len(sequences) > self.capacity:
            self._make_rows(max(FEWEST_ROWS, 1 << (len(sequences) - 1).bit_length()))
        rows = np.array([self._row(sequence) for sequence in sequences], np.int64)
        for row, sequence in zip(rows.tolist(), sequences, strict=True):
            if self._lengths[row] != len(sequence.tokens):
                self._build(row, sequence)
        return rows

    def read(self, rows: Ints, index: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens, and their counts in the output, float [rows, columns]; `index` is `rows` on the
        device. Unused columns repeat the row's first column, so that all can be written."""
        most = int(self._distinct[rows].max())
        width = -(-most // STEP) * STEP
        here = self._columns[:width] < self._used.index_select(0, index)[:, None]
        ids = self._ids[:, :width].index_select(0, index)
        times = self._times[:, :width].index_select(0, index)
        return torch.where(here, ids, ids[:, :1]), torch.where(here, times, times[:, :1])

    def count(self, rows: Ints, index: Tensor, ids: Tensor, times: Tensor, drawn: Tensor) -> None:
        """Adds the drawn token [rows] to each row; `ids` and `times` are those of the last read."""
        lengths = self._lengths[rows] + 1
        self._lengths[rows] = -1  # in case one of these calls fails
        self._make_columns(int(self._distinct[rows].max()) + 1)
        again = ids == drawn[:, None]
        self._times[:, : ids.shape[1]].index_copy_(0, index, times + again)
        place = self._used.index_select(0, index)
        # Written after the last column, which is ignored if the token was seen before.
        self._ids[index, place] = drawn
        self._times[index, place] = torch.ones_like(place, dtype=self._times.dtype)
        self._used.index_add_(0, index, (~again.any(-1)).long())
        self._distinct[rows] = np.minimum(self._distinct[rows] + 1, self._vocab_size)
        self._lengths[rows] = lengths

    def _row(self, sequence: Sequence) -> int:
        """The sequence's row, a free one, or the least recently used one. The last is never of this
        step: there are as many rows as the step needs, and its sequences are the most recent."""
        row = self._rows.get(sequence)
        if row is None:
            count = len(self._rows)
            row = count if count < self.capacity else self._rows.popitem(last=False)[1]
            self._rows[sequence] = row
            self._lengths[row] = -1
        return row

    def _build(self, row: int, sequence: Sequence) -> None:
        tokens = np.array(sequence.tokens, np.int64)
        if tokens[-1] < 0:
            raise ValueError(f"the newest token of {sequence.request_id} was not drawn here")
        ids, places = np.unique(tokens, return_inverse=True)
        output = np.arange(len(tokens)) >= sequence.prompt_tokens
        self._make_columns(len(ids))
        times = np.bincount(places, weights=output).astype(np.float32)
        self._ids[row, : len(ids)] = to_device(ids, self._device)
        self._times[row, : len(ids)] = to_device(times, self._device)
        self._used[row] = len(ids)
        self._distinct[row] = len(ids)
        self._lengths[row] = len(tokens)

    def _make_rows(self, count: int) -> None:
        more = count - self.capacity
        self._lengths = np.concatenate([self._lengths, np.full(more, -1)])
        self._distinct = np.concatenate([self._distinct, np.zeros(more, np.int64)])
        self._ids = torch.cat([self._ids, self._ids.new_zeros(more, self._ids.shape[1])])
        self._times = torch.cat([self._times, self._times.new_zeros(more, self._ids.shape[1])])
        self._used = torch.cat([self._used, self._used.new_zeros(more)])

    def _make_columns(self, distinct: int) -> None:
        """Makes room for this many tokens per row, and for one that is written after them."""
        rows, width = self._ids.shape
        if distinct < width:
            return
        more = (STEP << (distinct // STEP).bit_length()) - width
        self._ids = torch.cat([self._ids, self._ids.new_zeros(rows, more)], 1)
        self._times = torch.cat([self._times, self._times.new_zeros(rows, more)], 1)
        self._columns = torch.arange(width + more, device=self._device)
