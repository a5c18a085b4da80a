"""Tells requests' stories from the steps of a state: beside it while it serves, or from its log.

    teller.tell(event, now, actions, state)   after every step

Costs a few microseconds a change. What repeats itself, a reason to wait round after round, a slice
extended, tokens reported, is compared and counted in columns by board row, all rows at once, and
becomes a chapter when something else happens or somebody asks.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from math import inf

import numpy as np

from services.core import FinishReason, Grant
from services.forecast import Floats, Ints
from services.policies.decision import Decision, Reason, Why
from services.policies.order.ranking import Ranking
from services.scheduler import events as ev
from services.scheduler.board import Phase
from services.scheduler.state import SchedulerState
from services.scheduler.story import MOST_NAMES, Chapter, Kind, Story, Tale
from services.verdict import Timeline, sentence

NOTHING, EXTENDED = -2, -1  # of `repeats`; else a Reason
REFUSED_SHARE = 4  # one in so many stories may be of one refused: a storm of them hides no other
NO_KV, ON_DEVICE, IN_HOST = 0, 1, 2


class Columns:
    """What was last told of the job in a board row."""

    def __init__(self, rows: int = 0):
        self.repeats: Ints = np.full(rows, NOTHING, np.int64)  # what has gone on since `since_s`
        self.times: Ints = np.zeros(rows, np.int64)
        self.since_s: Floats = np.zeros(rows)
        self.until_s: Floats = np.zeros(rows)
        self.a: Floats = np.zeros(rows)  # the numbers of the last time
        self.b: Floats = np.zeros(rows)
        self.limit: Ints = np.zeros(rows, np.int64)
        self.place: Ints = np.zeros(rows, np.int64)  # in the line; 0: not seen there yet
        self.of: Ints = np.zeros(rows, np.int64)
        self.placed_s: Floats = np.full(rows, inf)  # when it had that place; infinite once told
        self.kv: Ints = np.zeros(rows, np.int64)
        self.output: Ints = np.zeros(rows, np.int64)
        self.last_s: Floats = np.zeros(rows)  # of its last tokens
        self.longest_s: Floats = np.zeros(rows)  # gap
        self.runs = np.zeros(rows, bool)
        self.slow = np.zeros(rows, bool)  # its next tokens end a wait
        self.serial: Ints = np.full(rows, -1, np.int64)  # scratch: who was in the contest

    def reach(self, rows: int) -> None:
        if rows > len(self.repeats):
            more = Columns(rows - len(self.repeats))
            for name, column in vars(self).items():
                setattr(self, name, np.concatenate([column, getattr(more, name)]))


class Teller:
    """Stories of all live requests, and of the last `ended_most` that have ended."""

    def __init__(self, ended_most: int):
        self.ended_most = ended_most
        self.ended_count = 0
        self._live: dict[str, Tale] = {}
        self._ended: OrderedDict[str, Tale] = OrderedDict()
        self._refused: OrderedDict[str, Tale] = OrderedDict()
        self._rows: dict[int, Tale] = {}
        self._columns = Columns()
        self._decision: Decision | None = None
        self._decided_s = 0.0
        self._events: dict[str, Callable[..., None]] = {
            "submitted": self._submitted,
            "forecasted": self._forecasted,
            "reported": self._reported,
        }
        self._actions: dict[str, Callable[..., None]] = {
            "place": self._placed,
            "resume": self._resumed,
            "preempt": self._preempted,
            "send_plan": self._planned,
            "finish": self._finished,
            "refuse": self._refuse,
        }

    def tell(
        self, event: ev.Event, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        """What this step meant, once it was taken."""
        self._columns.reach(len(state.ledger.board.phase))
        if handler := self._events.get(event.kind):
            handler(event, now, actions, state)
        whys = self._decided(now, state)
        for action in actions:
            if told := self._actions.get(action.kind):
                told(action, now, event, state, whys)
        if isinstance(event, ev.Reported | ev.Round | ev.Arranged):
            self._returned(now, state)
        if isinstance(event, ev.Cancelled):
            self._cancelled(event, now, state)
        elif isinstance(event, ev.GatewayLost):
            for tale in [tale for tale in self._live.values() if tale.link == event.link]:
                self._end(tale, Chapter(now, Kind.LEFT), FinishReason.CANCELLED, now)

    # What is asked

    @property
    def live_count(self) -> int:
        return len(self._live)

    @property
    def kept_count(self) -> int:
        """Of those that have ended."""
        return len(self._ended) + len(self._refused)

    def knows(self, request_id: str) -> bool:
        return any(request_id in each for each in (self._live, self._ended, self._refused))

    def ids(self, beginning: str) -> list[str]:
        """Requests whose ids begin so. O(stories)."""
        every = chain(self._live, self._ended, self._refused)
        return [request_id for request_id in every if request_id.startswith(beginning)]

    def story(self, request_id: str, state: SchedulerState) -> Story | None:
        tale = self._live.get(request_id)
        if tale:
            return tale.story(True, chain(tale.told(), self._pending(tale), self._now(tale, state)))
        tale = self._ended.get(request_id) or self._refused.get(request_id)
        return tale.story(False, tale.told()) if tale else None

    def _now(self, tale: Tale, state: SchedulerState) -> Iterator[Chapter]:
        """Where one that waits stands by the last round."""
        ranking, number = state.rounds.ranking, tale.row
        if ranking is None or state.ledger.board.phase[number] != Phase.QUEUED:
            return
        key = ranking.key[: ranking.split]
        at = np.flatnonzero(ranking.queued == number)
        if len(at):
            place = int(np.count_nonzero(key < key[at[0]])) + 1
            latest_s = max(self._decided_s, tale.chapters[-1].at_s)
            yield Chapter(latest_s, Kind.LINE, (place, len(key)))

    # Writing

    def _add(self, tale: Tale, chapter: Chapter) -> None:
        self._flush(tale)
        tale.add(chapter)

    def _flush(self, tale: Tale) -> None:
        for chapter in self._pending(tale):
            tale.add(chapter)
        self._columns.repeats[tale.row] = NOTHING
        self._columns.placed_s[tale.row] = inf

    def _pending(self, tale: Tale) -> Iterator[Chapter]:
        """What its columns have that is no chapter yet."""
        c, row = self._columns, tale.row
        if c.placed_s[row] < inf:
            yield Chapter(float(c.placed_s[row]), Kind.LINE, (int(c.place[row]), int(c.of[row])))
        repeats = int(c.repeats[row])
        if repeats == NOTHING:
            return
        times, until_s = int(c.times[row]), float(c.until_s[row])
        since_s = float(c.since_s[row])
        if repeats == EXTENDED:
            yield Chapter(since_s, Kind.EXTENDED, (int(c.limit[row]),), times, until_s)
        else:
            values = (repeats, float(c.a[row]), float(c.b[row]))
            yield Chapter(since_s, Kind.WAITS, values, times, until_s)

    def _begin(self, tale: Tale, row: int) -> None:
        tale.row = row
        tale.line = Timeline(tale.arrival_s)
        c = self._columns
        self._live[tale.request_id] = self._rows[row] = tale
        c.repeats[row], c.placed_s[row] = NOTHING, inf
        c.place[row] = c.limit[row] = c.kv[row] = 0
        c.output[row] = tale.delivered
        c.longest_s[row], c.slow[row], c.runs[row] = 0.0, True, False

    def _end(self, tale: Tale, chapter: Chapter, reason: FinishReason, now: float) -> None:
        self._add(tale, chapter)
        self._sync(tale)
        tale.line.ended_s = now
        if not tale.delivered:  # else only its gateway saw all of it
            judged = sentence(tale.sla, tale.line, reason)
            self._add(tale, Chapter(now, Kind.JUDGED, (f"by its worker's reports, {judged}",)))
        del self._live[tale.request_id]
        if self._rows.get(tale.row) is tale:
            del self._rows[tale.row]
            self._columns.runs[tale.row] = False
        tale.row = -1
        self._keep(tale, self._ended, self.ended_most)

    def _keep(self, tale: Tale, among: "OrderedDict[str, Tale]", most: int) -> None:
        self.ended_count += 1
        among[tale.request_id] = tale
        among.move_to_end(tale.request_id)
        while len(among) > most:
            among.popitem(last=False)

    # Events

    def _submitted(
        self, event: ev.Submitted, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        asked = event.request
        job, known = state.jobs.get(asked.request_id), self._live.get(asked.request_id)
        if known and known.link == event.link:
            return  # refused for its name; the one that has it goes on
        if known and job and job.request is not asked:
            known.link = event.link
            self._add(known, Chapter(now, Kind.REJOINED))
            return
        if known:
            self._end(known, Chapter(now, Kind.LEFT), FinishReason.CANCELLED, now)
        tale = Tale(
            asked.request_id, event.link, asked.arrival_s, asked.sla, asked.delivered_tokens
        )
        values = (asked.prompt_tokens, asked.delivered_tokens, asked.max_tokens, asked.sla)
        tale.add(Chapter(now, Kind.ARRIVED, (*values, asked.deadline_s - now)))
        if job:
            self._begin(tale, job.row)
            return
        [message] = {a.reject.message for a in actions if isinstance(a, ev.Refuse)}
        tale.add(Chapter(now, Kind.REFUSED, (message,)))
        self._keep(tale, self._refused, self.ended_most // REFUSED_SHARE)

    def _forecasted(
        self, event: ev.Forecasted, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        total = state.ledger.board.jobs.total
        for request_id, forecast in event.forecasts:
            tale = self._live.get(request_id)
            told = (forecast.source, forecast.version)
            if tale is None or tale.forecast == told or request_id not in state.jobs:
                continue
            tale.forecast = told
            cap = state.jobs[request_id].request.max_tokens
            made = int(self._columns.output[tale.row])
            median, most = (min(cap, forecast.quantile(q, made)) for q in (0.5, 0.9))
            values = (*told, float(total[tale.row]), median, most)
            self._add(tale, Chapter(now, Kind.FORECAST, values))

    def _reported(
        self, event: ev.Reported, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        """Tokens made, and KV gone or come: found by comparing the board with what was told."""
        worker = state.workers.get(event.worker_id)
        if worker is None or worker.link != event.link:
            return
        board, c = state.ledger.board, self._columns
        jobs = board.jobs
        here = (jobs.home == worker.number) & (board.phase != Phase.FREE)
        rows = np.flatnonzero(here)
        output = jobs.output[rows]
        more = output - c.output[rows]
        for row in rows[(more > 0) & c.slow[rows]].tolist():
            self._made(self._rows[row], int(jobs.output[row]), now)
        steady = c.output[rows] < output
        at, count = rows[steady], more[steady]
        c.longest_s[at] = np.maximum(c.longest_s[at], (now - c.last_s[at]) / count)
        c.output[at], c.last_s[at] = output[steady], now
        for told in event.report.evicted:
            if tale := self._live.get(told.request_id):
                c.kv[tale.row] = _kv_of(told.held_tokens, told.blocks)
        kv = np.where(jobs.held[rows] == 0, NO_KV, np.where(jobs.blocks[rows] > 0, 1, 2))
        for at_ in np.flatnonzero((kv != c.kv[rows]) & (c.kv[rows] != NO_KV)).tolist():
            self._shifted(self._rows[int(rows[at_])], int(kv[at_]), now, state)
        c.kv[rows] = kv

    def _made(self, tale: Tale, output: int, now: float) -> None:
        """Tokens after a wait: the first, or the first since it was preempted. What one that does
        not run was still to tell of, it made before it stopped."""
        c, row, line = self._columns, tale.row, tale.line
        first, runs = not line.tokens, bool(c.runs[row])
        self._sync(tale)
        line.away &= runs
        count = output - int(c.output[row])
        line.on_tokens(count, now, gaps=count)
        c.output[row], c.last_s[row], c.longest_s[row] = output, now, line.longest_gap_s
        c.slow[row] = not runs
        if not runs:
            line.on_preempted()
        if first:
            self._add(tale, Chapter(now, Kind.STARTED, (output, tale.worker)))

    def _sync(self, tale: Tale) -> None:
        """Its timeline as the columns have it by now."""
        if tale.line.tokens:
            c, row, line = self._columns, tale.row, tale.line
            line.tokens = int(c.output[row]) - tale.delivered
            line.last_token_s = float(c.last_s[row])
            line.longest_gap_s = float(c.longest_s[row])

    def _shifted(self, tale: Tale, kv: int, now: float, state: SchedulerState) -> None:
        held = int(state.ledger.board.jobs.held[tale.row])
        if kv == NO_KV:
            self._add(tale, Chapter(now, Kind.DROPPED))
        else:
            kind = Kind.SWAPPED_OUT if kv == IN_HOST else Kind.SWAPPED_IN
            self._add(tale, Chapter(now, kind, (held,)))

    def _cancelled(self, event: ev.Cancelled, now: float, state: SchedulerState) -> None:
        tale = self._live.get(event.request_id)
        if tale is None or tale.link != event.link or event.request_id in state.jobs:
            return
        if event.output_tokens > self._columns.output[tale.row]:
            self._made(tale, event.output_tokens, now)
        if event.reason is FinishReason.CANCELLED:
            chapter = Chapter(now, Kind.CANCELLED, (event.output_tokens,))
        else:
            chapter = Chapter(now, Kind.STOPPED, (event.output_tokens,))
        self._end(tale, chapter, event.reason, now)

    # Decisions

    def _decided(self, now: float, state: SchedulerState) -> Mapping[int, Why]:
        """What a round found of those who wait; why it admitted the others, by row."""
        decision = state.rounds.decision
        if decision is self._decision:
            return {}
        self._decision, self._decided_s = decision, now
        board, c = state.ledger.board, self._columns
        c.serial[decision.rows] = decision.serials
        why = decision.why
        known = why.rows < len(board.phase)  # a batcher may say anything
        rows, reasons, a, b = (column[known] for column in (why.rows, why.reasons, why.a, why.b))
        fresh = c.serial[rows] == board.jobs.serial[rows]
        admitted = fresh & (reasons == Reason.ADMITTED)
        waits = fresh & ~admitted & (board.phase[rows] == Phase.QUEUED)
        self._repeat(rows[waits], reasons[waits], now)
        c.a[rows[waits]], c.b[rows[waits]] = a[waits], b[waits]
        self._extended(now, state)
        if state.rounds.ranking:
            self._lined_up(state.rounds.ranking, now, state)
        numbers = zip(*(each[admitted].tolist() for each in (rows, a, b)), strict=True)
        return {row: Why(Reason.ADMITTED, of, most) for row, of, most in numbers}

    def _extended(self, now: float, state: SchedulerState) -> None:
        board, c = state.ledger.board, self._columns
        running = np.flatnonzero((board.phase == Phase.RUNNING) & c.runs[: len(board.phase)])
        limit = board.jobs.limit[running]
        longer = limit > c.limit[running]
        rows = running[longer]
        self._repeat(rows, np.full(len(rows), EXTENDED), now)
        c.limit[rows] = limit[longer]

    def _repeat(self, rows: Ints, what: Ints, now: float) -> None:
        """The same once more, or something else from now on. O(rows), and a chapter for each of
        those that end."""
        c = self._columns
        other = c.repeats[rows] != what
        for row in rows[other & (c.repeats[rows] != NOTHING)].tolist():
            self._flush(self._rows[row])
        fresh = rows[other]
        c.repeats[fresh], c.times[fresh], c.since_s[fresh] = what[other], 0, now
        c.times[rows] += 1
        c.until_s[rows] = now

    def _lined_up(self, ranking: Ranking, now: float, state: SchedulerState) -> None:
        """The place at which each who is new there came to stand in the line."""
        c, queued = self._columns, ranking.queued
        fresh = np.flatnonzero(c.place[queued] == 0)
        fresh = fresh[state.ledger.board.phase[queued[fresh]] == Phase.QUEUED]
        if not len(fresh):
            return
        key = ranking.key[: ranking.split]
        rows = queued[fresh]
        c.place[rows] = np.searchsorted(np.sort(key), key[fresh]) + 1
        c.of[rows], c.placed_s[rows] = len(key), now

    # Actions

    def _placed(
        self, action: ev.Place, now: float, event: ev.Event, state: SchedulerState,
        whys: Mapping[int, Why],
    ) -> None:  # fmt: skip
        tale = self._live.get(action.request_id)
        if tale is None:
            return
        why, limit = whys.get(tale.row), self._runs(tale, state)
        there, here = tale.worker, action.worker_id
        if there and there != here:
            self._add(tale, Chapter(now, Kind.MOVED, (there, here, limit, why)))
        elif there:
            self._add(tale, Chapter(now, Kind.RESUMED, (here, limit, 0, why)))
        else:
            self._add(tale, Chapter(now, Kind.PLACED, (here, limit, why)))
        tale.worker = here
        self._columns.kv[tale.row] = NO_KV
        tale.line.placed_s = min(tale.line.placed_s, now)
        if there:
            tale.line.on_resumed(False, now)

    def _resumed(
        self, action: ev.Resume, now: float, event: ev.Event, state: SchedulerState,
        whys: Mapping[int, Why],
    ) -> None:  # fmt: skip
        """Again where its tokens are; where no round said so, it was taken over there."""
        tale = self._live.get(action.request_id)
        if tale is None:
            return
        if isinstance(event, ev.Round | ev.Arranged):
            limit = self._runs(tale, state)
            values = (tale.worker, limit, action.held_tokens, whys.get(tale.row))
            self._add(tale, Chapter(now, Kind.RESUMED, values))
            tale.line.on_resumed(action.held_tokens > 0, now)
        elif not self._columns.runs[tale.row]:
            self._adopt(tale, now, state, runs=True)

    def _adopt(self, tale: Tale, now: float, state: SchedulerState, runs: bool) -> None:
        job = state.jobs[tale.request_id]
        tale.worker = state.ledger.home(job)
        values = (tale.worker, state.ledger.output(job), runs)
        self._add(tale, Chapter(now, Kind.ADOPTED, values))
        tale.line.placed_s = min(tale.line.placed_s, now)
        if runs:
            self._runs(tale, state)

    def _runs(self, tale: Tale, state: SchedulerState) -> int:
        """It runs from now on, and to which limit."""
        limit = int(state.ledger.board.jobs.limit[tale.row])
        self._columns.runs[tale.row] = True
        self._columns.limit[tale.row] = limit
        return limit

    def _planned(
        self, action: ev.SendPlan, now: float, event: ev.Event, state: SchedulerState,
        whys: Mapping[int, Why],
    ) -> None:  # fmt: skip
        admitted: Sequence[Grant] = action.plan.admit
        for pause in action.plan.pause:
            tale = self._live.get(pause.request_id)
            if tale is None:
                continue
            others = tuple(grant.request_id for grant in islice(admitted, MOST_NAMES))
            output = int(state.ledger.board.jobs.output[tale.row])
            values = (action.worker_id, output, others, len(admitted) - len(others))
            self._stops(tale, Chapter(now, Kind.PAUSED, values))

    def _preempted(
        self, action: ev.Preempt, now: float, event: ev.Event, state: SchedulerState,
        whys: Mapping[int, Why],
    ) -> None:  # fmt: skip
        """Of those that ran: evicted, or lost with their worker. A pause was told with its plan."""
        tale = self._live.get(action.request_id)
        if tale is None:
            return
        if not self._columns.runs[tale.row]:
            if not tale.worker and state.ledger.home(state.jobs[tale.request_id]):
                self._adopt(tale, now, state, runs=False)
        elif isinstance(event, ev.Reported):
            held = int(state.ledger.board.jobs.held[tale.row])
            values = (tale.worker, action.output_tokens, held, held > 0)
            self._stops(tale, Chapter(now, Kind.EVICTED, values))
        else:
            self._stops(tale, Chapter(now, Kind.LOST, (tale.worker,)))
            self._columns.kv[tale.row] = NO_KV

    def _returned(self, now: float, state: SchedulerState) -> None:
        """Who waits again, and nobody was told: its slice is made."""
        phase, c = state.ledger.board.phase, self._columns
        for row in np.flatnonzero(c.runs[: len(phase)] & (phase == Phase.QUEUED)).tolist():
            if tale := self._rows.get(row):
                output = int(state.ledger.board.jobs.output[row])
                self._stops(tale, Chapter(now, Kind.RETURNED, (tale.worker, output)))

    def _stops(self, tale: Tale, chapter: Chapter) -> None:
        c, row = self._columns, tale.row
        self._add(tale, chapter)
        self._sync(tale)
        tale.line.on_preempted()
        c.runs[row], c.slow[row], c.place[row] = False, True, 0

    def _finished(
        self, action: ev.Finish, now: float, event: ev.Event, state: SchedulerState,
        whys: Mapping[int, Why],
    ) -> None:  # fmt: skip
        tale = self._live.get(action.request_id)
        if tale is None:
            return
        if action.output_tokens > self._columns.output[tale.row]:
            self._made(tale, action.output_tokens, now)
        values = (
            action.reason, action.output_tokens, action.preemptions, action.queued_s,
            action.message,
        )  # fmt: skip
        self._end(tale, Chapter(now, Kind.FINISHED, values), action.reason, now)

    def _refuse(
        self, action: ev.Refuse, now: float, event: ev.Event, state: SchedulerState,
        whys: Mapping[int, Why],
    ) -> None:  # fmt: skip
        """One that was let in, and that no worker there is now can serve."""
        tale = self._live.get(action.request_id)
        if tale and action.request_id not in state.jobs:
            tale.line.rejected = True
            chapter = Chapter(now, Kind.REFUSED, (action.reject.message,))
            self._end(tale, chapter, FinishReason.ERROR, now)


def _kv_of(held: int, blocks: int) -> int:
    return NO_KV if not held else ON_DEVICE if blocks else IN_HOST
