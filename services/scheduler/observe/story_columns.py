"""Story state by board row, so that one vectorised pass compares all rows."""

from collections.abc import Iterator

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import RequestColumns

NOTHING, EXTENDED = -2, -1  # values of `repeats` besides a Reason
IDLE = np.iinfo(np.int64).max  # `limit` of a request that does not run: no limit exceeds it
UNWATCHED, NO_KV, ON_DEVICE, IN_HOST = -1, 0, 1, 2


class StoryColumns:
    """One value per board row; they grow with the board."""

    def __init__(self, rows: int = 0):
        self.repeats: Ints = np.full(rows, NOTHING, np.int64)  # the chapter that still repeats
        self.since_s: Floats = np.zeros(rows)  # first extension of its slice,
        self.times: Ints = np.zeros(rows, np.int64)  # their number,
        self.until_s: Floats = np.zeros(rows)  # and the last one
        self.limit: Ints = np.full(rows, IDLE, np.int64)
        self.kv: Ints = np.full(rows, UNWATCHED, np.int64)  # where the KV of a waiting request is

    def grow_to(self, rows: int) -> None:
        if rows > len(self.repeats):
            more = StoryColumns(rows - len(self.repeats))
            for name, column in vars(self).items():
                setattr(self, name, np.concatenate([column, getattr(more, name)]))

    def count_extensions(self, limit: Ints, now: float) -> None:
        """Count the slices that the board's current limits extend. O(rows)."""
        rows = np.flatnonzero(limit > self.limit[: len(limit)])
        fresh = rows[self.repeats[rows] != EXTENDED]
        self.repeats[fresh], self.since_s[fresh], self.times[fresh] = EXTENDED, now, 0
        self.times[rows] += 1
        self.limit[rows], self.until_s[rows] = limit[rows], now

    def moved_kv(self, jobs: RequestColumns) -> Iterator[tuple[int, int, int]]:
        """Watched rows whose KV has moved: row, new location, tokens. O(rows)."""
        rows = np.flatnonzero(self.kv != UNWATCHED)
        held = jobs.held[rows]
        kv = np.where(held == 0, NO_KV, np.where(jobs.blocks[rows] > 0, ON_DEVICE, IN_HOST))
        moved = kv != self.kv[rows]
        yield from zip(rows[moved].tolist(), kv[moved].tolist(), held[moved].tolist(), strict=True)
