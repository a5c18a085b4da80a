"""Writes the stories of live requests, and keeps those of ended ones within a bound.

Conditions that repeat, such as the same reason to wait in every round or an extended slice, are
counted in columns by board row. They become one chapter when something else happens.
"""

from collections.abc import Iterator
from itertools import chain

import numpy as np

from services.forecast import Floats, Ints
from services.policies.snapshot import RequestColumns
from services.runtime.bounded_dict import BoundedDict
from services.scheduler.observe.story import Kind, Noted, OpenStory, Values

NOTHING, EXTENDED = -2, -1  # values of `repeats` besides a WaitReason
IDLE = np.iinfo(np.int64).max  # `limit` of a request that does not run: no limit exceeds it
UNWATCHED, NO_KV, ON_DEVICE, IN_HOST = -1, 0, 1, 2
REFUSED_SHARE = 4  # refused requests fill at most 1/4 of the bound, so that they displace no others


class StoryStore:
    """Stories of live requests by id, of the last `max_ended` that ended, and of some refused
    ones."""

    def __init__(self, max_ended: int):
        self.live: dict[str, OpenStory] = {}
        self.ended_count = 0
        self._ended = BoundedDict[str, OpenStory](max_ended)
        self._refused = BoundedDict[str, OpenStory](max_ended // REFUSED_SHARE)

    @property
    def kept_count(self) -> int:
        """Stories of ended requests."""
        return len(self._ended) + len(self._refused)

    def knows(self, request_id: str) -> bool:
        return request_id in self.live or self.ended(request_id) is not None

    def ended(self, request_id: str) -> OpenStory | None:
        return self._ended.get(request_id) or self._refused.get(request_id)

    def ids(self, prefix: str) -> list[str]:
        """Request ids that start with this. O(stories)."""
        every = chain(self.live, self._ended, self._refused)
        return [request_id for request_id in every if request_id.startswith(prefix)]

    def end(self, story: OpenStory) -> None:
        del self.live[story.request_id]
        self._keep(story, self._ended)

    def refuse(self, story: OpenStory) -> None:
        self._keep(story, self._refused)

    def _keep(self, story: OpenStory, among: BoundedDict[str, OpenStory]) -> None:
        self.ended_count += 1
        among.pop(story.request_id, None)
        among[story.request_id] = story


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
        """Counts the slices that the board's current limits extend. O(rows)."""
        rows = np.flatnonzero(limit > self.limit[: len(limit)])
        fresh = rows[self.repeats[rows] != EXTENDED]
        self.repeats[fresh], self.since_s[fresh], self.times[fresh] = EXTENDED, now, 0
        self.times[rows] += 1
        self.limit[rows], self.until_s[rows] = limit[rows], now

    def moved_kv(self, jobs: RequestColumns) -> Iterator[tuple[int, int, int]]:
        """Watched rows with moved KV: row, new location, tokens. O(rows)."""
        rows = np.flatnonzero(self.kv != UNWATCHED)
        held = jobs.held[rows]
        kv = np.where(held == 0, NO_KV, np.where(jobs.blocks[rows] > 0, ON_DEVICE, IN_HOST))
        moved = kv != self.kv[rows]
        yield from zip(rows[moved].tolist(), kv[moved].tolist(), held[moved].tolist(), strict=True)


class StoryWriter:
    """Open stories by board row, and the store of all stories."""

    def __init__(self, max_ended: int):
        self.store = StoryStore(max_ended)
        self.columns = StoryColumns()
        self.rows: dict[int, OpenStory] = {}
        self.unstarted: dict[int, OpenStory] = {}  # admitted, no token reported yet
        self.watched = 0  # rows with KV that is followed
        self.decided_s = 0.0  # time of the last round
        self.rounds = 0
        self.deciding = False  # whether the current step carries a new decision
        self._previous_s = 0.0  # time of the round before

    def begin_round(self, now: float) -> None:
        """The current step carries a decision, until `deciding` is reset."""
        self.deciding = True
        self._previous_s, self.decided_s = self.decided_s, now
        self.rounds += 1

    def open(self, story: OpenStory, row: int, rows: int) -> None:
        """Starts the story of a live request in this row of a board of `rows`."""
        story.row = row
        self.columns.grow_to(rows)
        self.store.live[story.request_id] = self.rows[row] = story
        self.columns.repeats[row] = NOTHING

    def add(self, story: OpenStory, now: float, kind: str, values: Values = ()) -> None:
        """Adds a chapter, after the one that was repeating until now."""
        if story.waits or (story.runs and self.columns.repeats.item(story.row) != NOTHING):
            self.flush(story)
        story.add((now, kind, values))

    def flush(self, story: OpenStory) -> None:
        story.add(self.pending(story))
        story.waits = None
        self.columns.repeats[story.row] = NOTHING

    def pending(self, story: OpenStory) -> Noted:
        """The chapter of the repeating condition. While a round is recorded, the condition ended
        with the round before."""
        if waits := story.waits:
            since_s, before, values = waits
            rounds = self.rounds - self.deciding - before
            until_s = self._previous_s if self.deciding else self.decided_s
            return since_s, Kind.WAITS, values, rounds if rounds > 1 else 1, until_s
        c, row = self.columns, story.row
        times, until_s = c.times.item(row), c.until_s.item(row)
        return c.since_s.item(row), Kind.EXTENDED, (c.limit.item(row),), times, until_s

    def start(self, story: OpenStory, output: int, now: float) -> None:
        del self.unstarted[story.row]
        self.add(story, now, Kind.STARTED, (output, story.worker))

    def run(self, story: OpenStory, limits: Ints) -> int:
        """Marks it as running; returns its limit from the board's column."""
        limit: int = limits.item(story.row)
        story.runs = True
        self.columns.limit[story.row] = limit
        return limit

    def stop(self, story: OpenStory, now: float, kind: str, values: Values, kv: int) -> None:
        """Marks it as stopped, and follows its KV from the given location."""
        self.add(story, now, kind, values)
        if story.runs:
            story.runs = False
            self.columns.limit[story.row] = IDLE
            self.unstarted.pop(story.row, None)
        self.watch(story, kv)

    def watch(self, story: OpenStory, kv: int) -> None:
        before = story.watched
        if before or kv != UNWATCHED:
            story.watched = kv != UNWATCHED
            self.watched += story.watched - before
            self.columns.kv[story.row] = kv

    def end(self, story: OpenStory, now: float, kind: str, values: Values = ()) -> None:
        self.stop(story, now, kind, values, UNWATCHED)
        del self.rows[story.row]
        self.store.end(story)
