"""Where stories are written while their requests live: chapters, and what goes on and is none yet.

What repeats itself, a reason to wait round after round or a slice extended, is counted in columns
by board row, all rows at once, and becomes a chapter when something else happens.
"""

from services.forecast import Ints
from services.scheduler.observe.story import Kind, Noted, OpenStory, Values
from services.scheduler.observe.story_columns import IDLE, NOTHING, UNWATCHED, Columns
from services.scheduler.observe.story_store import StoryStore


class StoryWriter:
    """Tales of the living by board row, and the store where they and the ended stand."""

    def __init__(self, ended_most: int):
        self.store = StoryStore(ended_most)
        self.columns = Columns()
        self.rows: dict[int, OpenStory] = {}
        self.unstarted: dict[int, OpenStory] = {}  # admitted, and no token reported
        self.watched = 0  # rows whose KV is
        self.decided_s = 0.0  # of the last round
        self.rounds = 0
        self.deciding = False  # whether the step that is told has a new decision
        self._before_s = 0.0  # of the round before

    def decide(self, now: float) -> None:
        """A round is told, until `deciding` is taken back."""
        self.deciding = True
        self._before_s, self.decided_s = self.decided_s, now
        self.rounds += 1

    def begin(self, tale: OpenStory, row: int, rows: int) -> None:
        """One lives, in this row of so many that the board has."""
        tale.row = row
        self.columns.reach(rows)
        self.store.live[tale.request_id] = self.rows[row] = tale
        self.columns.repeats[row] = NOTHING

    def add(self, tale: OpenStory, now: float, kind: str, values: Values = ()) -> None:
        """A chapter, behind the one of what went on until now."""
        if tale.waits or (tale.runs and self.columns.repeats.item(tale.row) != NOTHING):
            self.flush(tale)
        tale.add((now, kind, values))

    def flush(self, tale: OpenStory) -> None:
        tale.add(self.pending(tale))
        tale.waits = None
        self.columns.repeats[tale.row] = NOTHING

    def pending(self, tale: OpenStory) -> Noted:
        """What repeats itself and is no chapter yet. While a round is told, that has ended with
        the round before."""
        if waits := tale.waits:
            since_s, before, values = waits
            rounds = self.rounds - self.deciding - before
            until_s = self._before_s if self.deciding else self.decided_s
            return since_s, Kind.WAITS, values, rounds if rounds > 1 else 1, until_s
        c, row = self.columns, tale.row
        times, until_s = c.times.item(row), c.until_s.item(row)
        return c.since_s.item(row), Kind.EXTENDED, (c.limit.item(row),), times, until_s

    def starts(self, tale: OpenStory, output: int, now: float) -> None:
        del self.unstarted[tale.row]
        self.add(tale, now, Kind.STARTED, (output, tale.worker))

    def runs(self, tale: OpenStory, limits: Ints) -> int:
        """It runs from now on, and to which limit of the board's."""
        limit: int = limits.item(tale.row)
        tale.runs = True
        self.columns.limit[tale.row] = limit
        return limit

    def stops(self, tale: OpenStory, now: float, kind: str, values: Values, kv: int) -> None:
        """It runs no more, and its KV is watched from there on."""
        self.add(tale, now, kind, values)
        self._idle(tale)
        self.watch(tale, kv)

    def watch(self, tale: OpenStory, kv: int) -> None:
        before = tale.watched
        if before or kv != UNWATCHED:
            tale.watched = kv != UNWATCHED
            self.watched += tale.watched - before
            self.columns.kv[tale.row] = kv

    def end(self, tale: OpenStory, now: float, kind: str, values: Values = ()) -> None:
        self.stops(tale, now, kind, values, UNWATCHED)
        del self.rows[tale.row]
        self.store.end(tale)

    def _idle(self, tale: OpenStory) -> None:
        if tale.runs:
            tale.runs = False
            self.columns.limit[tale.row] = IDLE
            self.unstarted.pop(tale.row, None)
