"""Writes the stories of live requests.

Conditions that repeat, such as the same reason to wait in every round or an extended slice, are
counted in columns by board row. They become one chapter when something else happens.
"""

from services.forecast import Ints
from services.scheduler.observe.story import Kind, Noted, OpenStory, Values
from services.scheduler.observe.story_columns import IDLE, NOTHING, UNWATCHED, StoryColumns
from services.scheduler.observe.story_store import StoryStore


class StoryWriter:
    """Open stories by board row, and the store of all stories."""

    def __init__(self, max_ended: int):
        self.store = StoryStore(max_ended)
        self.columns = StoryColumns()
        self.rows: dict[int, OpenStory] = {}
        self.unstarted: dict[int, OpenStory] = {}  # admitted, no token reported yet
        self.watched = 0  # rows whose KV is followed
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
        """Start the story of a live request in this row of a board of `rows`."""
        story.row = row
        self.columns.grow_to(rows)
        self.store.live[story.request_id] = self.rows[row] = story
        self.columns.repeats[row] = NOTHING

    def add(self, story: OpenStory, now: float, kind: str, values: Values = ()) -> None:
        """Add a chapter, after the one that was repeating until now."""
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
        """Mark it as running; returns its limit from the board's column."""
        limit: int = limits.item(story.row)
        story.runs = True
        self.columns.limit[story.row] = limit
        return limit

    def stop(self, story: OpenStory, now: float, kind: str, values: Values, kv: int) -> None:
        """Mark it as stopped, and follow its KV from the given location."""
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
