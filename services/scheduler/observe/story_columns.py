"""What was last told of the job in a board row, where all rows are compared at once."""

from collections.abc import Iterator

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import RequestColumns

NOTHING, EXTENDED = -2, -1  # what repeats itself; else a Reason
IDLE = np.iinfo(np.int64).max  # the limit of one that does not run: none is beyond it
UNWATCHED, NO_KV, ON_DEVICE, IN_HOST = -1, 0, 1, 2


class Columns:
    """One value a board row; they grow with the board."""

    def __init__(self, rows: int = 0):
        self.repeats: Ints = np.full(rows, NOTHING, np.int64)  # what goes on
        self.since_s: Floats = np.zeros(rows)  # of a slice extended: since when,
        self.times: Ints = np.zeros(rows, np.int64)  # how often,
        self.until_s: Floats = np.zeros(rows)  # and when for the last time
        self.limit: Ints = np.full(rows, IDLE, np.int64)
        self.kv: Ints = np.full(rows, UNWATCHED, np.int64)  # where it is, of those that waited

    def reach(self, rows: int) -> None:
        if rows > len(self.repeats):
            more = Columns(rows - len(self.repeats))
            for name, column in vars(self).items():
                setattr(self, name, np.concatenate([column, getattr(more, name)]))

    def extended(self, limit: Ints, now: float) -> None:
        """Counts the slices that these limits, a board's column, have extended. O(rows)."""
        rows = np.flatnonzero(limit > self.limit[: len(limit)])
        fresh = rows[self.repeats[rows] != EXTENDED]
        self.repeats[fresh], self.since_s[fresh], self.times[fresh] = EXTENDED, now, 0
        self.times[rows] += 1
        self.limit[rows], self.until_s[rows] = limit[rows], now

    def shifted(self, jobs: RequestColumns) -> Iterator[tuple[int, int, int]]:
        """Of those watched whose KV is elsewhere by now: row, where, and its tokens. O(rows)."""
        rows = np.flatnonzero(self.kv != UNWATCHED)
        held = jobs.held[rows]
        kv = np.where(held == 0, NO_KV, np.where(jobs.blocks[rows] > 0, ON_DEVICE, IN_HOST))
        news = kv != self.kv[rows]
        yield from zip(rows[news].tolist(), kv[news].tolist(), held[news].tolist(), strict=True)
