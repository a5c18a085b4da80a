"""Tells requests' stories from the steps of a state: beside it while it serves, or from its log.

    teller.tell(event, now, actions, state)   after every step

It stands on the path of every round, so it does little: a change is a tuple noted, in a
microsecond or two, and its sentence is made when somebody reads it. What repeats itself, a reason
to wait round after round or a slice extended, is counted in columns by board row, all rows at
once, and becomes a chapter when something else happens.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain, islice

import numpy as np

from services.core import FinishReason
from services.policies.decision import Decision, Reason, Whys
from services.policies.slice import SLICES
from services.policies.snapshot import Bools
from services.scheduler import events as ev
from services.scheduler.board.board import Phase
from services.scheduler.board.jobs import Job
from services.scheduler.state import SchedulerState
from services.scheduler.stories.columns import (
    IDLE,
    IN_HOST,
    NO_KV,
    NOTHING,
    ON_DEVICE,
    UNWATCHED,
    Columns,
)
from services.scheduler.stories.shelf import Shelf
from services.scheduler.stories.story import MOST_NAMES, Chapter, Kind, Noted, Story, Tale, Values

ADMITTED, QUEUED = int(Reason.ADMITTED), int(Phase.QUEUED)  # numpy compares these much faster
DECIDE = ("round", "arranged")  # events

Admitted = dict[int, tuple[float, float]]  # by row, the numbers of its admission
_NOBODY: Admitted = {}


class Teller:
    """Stories of all live requests, and of the last `ended_most` that have ended."""

    def __init__(self, ended_most: int):
        self.shelf = Shelf(ended_most)
        self._rows: dict[int, Tale] = {}
        self._unstarted: dict[int, Tale] = {}  # admitted, and no token reported
        self._watched = 0  # rows whose KV is
        self._columns = Columns()
        self._decision: Decision | None = None
        self._decided_s = self._before_s = 0.0  # of the last round, and of the one before
        self._rounds = 0
        self._deciding = False  # whether the step that is told has a new decision
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
        self._after: dict[str, Callable[..., None]] = {
            "cancelled": self._cancelled,
            "gateway_lost": self._gateway_lost,
        }

    def tell(
        self, event: ev.Event, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        """What this step meant, once it was taken."""
        if handler := self._events.get(event.kind):
            handler(event, now, actions, state)
        admitted = _NOBODY
        if state.rounds.decision is not self._decision:
            self._deciding = True
            admitted = self._decided(event, now, state)
        for action in actions:
            if told := self._actions.get(action.kind):
                told(action, now, event, state, admitted)
        if after := self._after.get(event.kind):
            after(event, now, state)
        self._deciding = False

    # What is asked

    def story(self, request_id: str, state: SchedulerState) -> Story | None:
        tale = self.shelf.live.get(request_id)
        if tale:
            return tale.story(True, chain(tale.told(), self._so_far(tale, state)))
        tale = self.shelf.over(request_id)
        return tale.story(False, tale.told()) if tale else None

    def _so_far(self, tale: Tale, state: SchedulerState) -> Iterator[Chapter]:
        """What repeats itself, and where one that waits stands by the last round."""
        if self._columns.repeats[tale.row] != NOTHING:
            yield Chapter(*self._pending(tale))
        ranking = state.rounds.ranking
        if ranking is None or state.ledger.board.phase[tale.row] != QUEUED:
            return
        at = np.flatnonzero(ranking.queued == tale.row)
        if len(at):
            key = ranking.key[: ranking.split]
            place = int(np.count_nonzero(key < key[at[0]])) + 1
            yield Chapter(max(self._decided_s, tale.last_s), Kind.LINE, (place, len(key)))

    # Writing

    def _add(self, tale: Tale, now: float, kind: str, values: Values = ()) -> None:
        if tale.waits or (tale.runs and self._columns.repeats.item(tale.row) != NOTHING):
            self._flush(tale)
        tale.add((now, kind, values))

    def _flush(self, tale: Tale) -> None:
        tale.add(self._pending(tale))
        tale.waits = None
        self._columns.repeats[tale.row] = NOTHING

    def _pending(self, tale: Tale) -> Noted:
        """What repeats itself and is no chapter yet. While a round is told, that has ended with
        the round before."""
        if waits := tale.waits:
            since_s, before, values = waits
            rounds = self._rounds - self._deciding - before
            until_s = self._before_s if self._deciding else self._decided_s
            return since_s, Kind.WAITS, values, rounds if rounds > 1 else 1, until_s
        c, row = self._columns, tale.row
        times, until_s = c.times.item(row), c.until_s.item(row)
        return c.since_s.item(row), Kind.EXTENDED, (c.limit.item(row),), times, until_s

    def _end(self, tale: Tale, now: float, kind: str, values: Values = ()) -> None:
        self._add(tale, now, kind, values)
        self._idle(tale)
        if tale.watched:
            self._watch(tale, UNWATCHED)
        del self._rows[tale.row]
        self.shelf.end(tale)

    def _idle(self, tale: Tale) -> None:
        if tale.runs:
            tale.runs = False
            self._columns.limit[tale.row] = IDLE
            self._unstarted.pop(tale.row, None)

    def _watch(self, tale: Tale, kv: int) -> None:
        before = tale.watched
        if before or kv != UNWATCHED:
            tale.watched = kv != UNWATCHED
            self._watched += tale.watched - before
            self._columns.kv[tale.row] = kv

    # Events

    def _submitted(
        self, event: ev.Submitted, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        asked = event.request
        job, known = state.jobs.get(asked.request_id), self.shelf.live.get(asked.request_id)
        if known and known.link == event.link:
            return  # refused for its name; the one that has it goes on
        if known and job and job.request is not asked:
            known.link = event.link
            self._add(known, now, Kind.REJOINED)
            return
        if known:
            self._end(known, now, Kind.LEFT)
        others = state.ledger.waiting - (job is not None)
        tale = Tale(asked, event.link, [(now, Kind.ARRIVED, (asked, now, others))])
        if job:
            tale.row = job.row
            self._columns.reach(len(state.ledger.board.phase))
            self.shelf.live[asked.request_id] = self._rows[job.row] = tale
            self._columns.repeats[job.row] = NOTHING
            return
        [message] = {a.reject.message for a in actions if isinstance(a, ev.Refuse)}
        tale.add((now, Kind.REFUSED, (message,)))
        self.shelf.refuse(tale)

    def _forecasted(
        self, event: ev.Forecasted, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        total = state.ledger.board.jobs.total
        for request_id, forecast in event.forecasts:
            tale = self.shelf.live.get(request_id)
            told = (forecast.source, forecast.version)
            if tale and tale.forecast != told:
                tale.forecast = told
                self._add(
                    tale,
                    now,
                    Kind.FORECAST,
                    (forecast, total.item(tale.row), tale.request.max_tokens),
                )

    def _reported(
        self, event: ev.Reported, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        output = state.ledger.board.jobs.output
        if self._unstarted:
            for row, tale in [*self._unstarted.items()]:
                if (made := output.item(row)) > tale.request.delivered_tokens:
                    self._starts(tale, made, now)
        for told in event.report.evicted:
            evicted = self.shelf.live.get(told.request_id)
            if evicted and evicted.runs:
                kv = NO_KV if not told.held_tokens else ON_DEVICE if told.blocks else IN_HOST
                self._watch(evicted, kv)
        if self._watched:
            self._follow_kv(now, state)
        if SLICES[state.preset.slice].returns:
            self._returned({told.request_id for told in event.report.evicted}, now, state)

    def _starts(self, tale: Tale, output: int, now: float) -> None:
        del self._unstarted[tale.row]
        self._add(tale, now, Kind.STARTED, (output, tale.worker))

    def _follow_kv(self, now: float, state: SchedulerState) -> None:
        """KV of those that were preempted: gone to host memory, back, or dropped."""
        for row, kv, held in self._columns.shifted(state.ledger.board.jobs):
            self._shifted(self._rows[row], kv, held, now)

    def _shifted(self, tale: Tale, kv: int, held: int, now: float) -> None:
        before = int(self._columns.kv[tale.row])
        self._watch(tale, UNWATCHED if tale.runs and kv == ON_DEVICE else kv)
        if before == NO_KV:
            return  # it is made anew
        if kv == NO_KV:
            self._add(tale, now, Kind.DROPPED)
        else:
            kind = Kind.SWAPPED_OUT if kv == IN_HOST else Kind.SWAPPED_IN
            self._add(tale, now, kind, (held,))

    def _returned(self, evicted: Set[str], now: float, state: SchedulerState) -> None:
        """Who ran, waits again, and was not stopped: its slice is made."""
        board = state.ledger.board
        runs = self._columns.limit < IDLE
        for row in np.flatnonzero(runs & (board.phase[: len(runs)] == QUEUED)).tolist():
            tale = self._rows[row]
            if tale.request.request_id not in evicted:
                values = (tale.worker, int(board.jobs.output[row]))
                self._stops(tale, now, Kind.RETURNED, values, ON_DEVICE)

    def _cancelled(self, event: ev.Cancelled, now: float, state: SchedulerState) -> None:
        tale = self.shelf.live.get(event.request_id)
        if tale and tale.link == event.link and event.request_id not in state.jobs:
            cancelled = event.reason is FinishReason.CANCELLED
            kind = Kind.CANCELLED if cancelled else Kind.STOPPED
            self._end(tale, now, kind, (event.output_tokens,))

    def _gateway_lost(self, event: ev.GatewayLost, now: float, state: SchedulerState) -> None:
        for tale in [tale for tale in self.shelf.live.values() if tale.link == event.link]:
            self._end(tale, now, Kind.LEFT)

    # Decisions

    def _decided(self, event: ev.Event, now: float, state: SchedulerState) -> Admitted:
        """What a round found of those who wait; and the numbers of those it admitted."""
        self._decision = decision = state.rounds.decision
        self._before_s, self._decided_s = self._decided_s, now
        self._rounds += 1
        why = decision.why
        if len(why.rows) and event.kind == "arranged":
            why = why.at(self._current(decision, state))
        return self._reasons(why, now) if len(why.rows) else {}

    def _reasons(self, why: Whys, now: float) -> Admitted:
        """Who waits for the same reason as before waits on, as does who is not looked at for a
        while. O(rows) in one pass of numpy, and a tuple or two for each of those with another."""
        repeats, tales = self._columns.repeats, self._rows
        other = (repeats.take(why.rows) != why.reasons).nonzero()[0]
        columns = (column.take(other).tolist() for column in (why.rows, why.reasons, why.a, why.b))
        admitted: Admitted = {}
        before = self._rounds - 1
        for row, reason, a, b in zip(*columns, strict=True):
            if reason == ADMITTED:
                admitted[row] = a, b
                continue
            if tale := tales.get(row):
                if repeats.item(row) != NOTHING:
                    self._flush(tale)
                tale.waits = now, before, (reason, a, b)
                repeats[row] = reason
        return admitted

    def _current(self, decision: Decision, state: SchedulerState) -> Bools:
        """Of the reasons of a batcher of its own: whether they are of who waits there now."""
        board, rows = state.ledger.board, decision.why.rows
        serials = dict(zip(decision.rows.tolist(), decision.serials.tolist(), strict=True))
        now_there = board.jobs.serial
        return np.array(
            [row in serials and serials[row] == now_there[row] for row in rows.tolist()], bool
        )

    # Actions

    def _placed(
        self, action: ev.Place, now: float, event: ev.Event, state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        tale = self.shelf.live.get(action.request_id)
        if tale is None:
            return
        there, here = tale.worker, action.worker_id
        limit, numbers = self._runs(tale, state), admitted.get(tale.row)
        if there and there != here:
            self._add(tale, now, Kind.MOVED, (there, here, limit, numbers))
        elif there:
            self._add(tale, now, Kind.RESUMED, (here, limit, 0, numbers))
        else:
            self._add(tale, now, Kind.PLACED, (here, limit, numbers))
            self._unstarted[tale.row] = tale
        tale.worker = here
        if tale.watched:
            self._watch(tale, UNWATCHED)

    def _resumed(
        self, action: ev.Resume, now: float, event: ev.Event, state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        """Again where its tokens are; where no round said so, it was taken over there."""
        tale = self.shelf.live.get(action.request_id)
        if tale is None:
            return
        if event.kind in DECIDE:
            values = (tale.worker, self._runs(tale, state), action.held_tokens)
            self._add(tale, now, Kind.RESUMED, (*values, admitted.get(tale.row)))
            if self._columns.kv[tale.row] != IN_HOST:
                self._watch(tale, UNWATCHED)
        elif not tale.runs and (job := state.jobs.get(action.request_id)):
            self._adopt(tale, job, now, state)
            self._runs(tale, state)

    def _adopt(self, tale: Tale, job: Job, now: float, state: SchedulerState) -> None:
        tale.worker = state.ledger.home(job)
        runs = state.ledger.phase(job) is Phase.RUNNING
        values = (tale.worker, state.ledger.output(job), runs)
        self._add(tale, now, Kind.ADOPTED, values)

    def _runs(self, tale: Tale, state: SchedulerState) -> int:
        """It runs from now on, and to which limit."""
        limit: int = state.ledger.board.jobs.limit.item(tale.row)
        tale.runs = True
        self._columns.limit[tale.row] = limit
        return limit

    def _planned(
        self, action: ev.SendPlan, now: float, event: ev.Event, state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        plan = action.plan
        if plan.extend:
            self._columns.extended(state.ledger.board.jobs.limit, now)
        for pause in plan.pause:
            tale = self.shelf.live.get(pause.request_id)
            if tale is None:
                continue
            others = tuple(grant.request_id for grant in islice(plan.admit, MOST_NAMES))
            output = int(state.ledger.board.jobs.output[tale.row])
            values = (action.worker_id, output, others, len(plan.admit) - len(others))
            self._stops(tale, now, Kind.PAUSED, values, ON_DEVICE)

    def _preempted(
        self, action: ev.Preempt, now: float, event: ev.Event, state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        """Of those that ran: evicted, or lost with their worker. A pause was told with its plan."""
        tale = self.shelf.live.get(action.request_id)
        if tale is None:
            return
        if not tale.runs:
            job = state.jobs.get(action.request_id)  # what is told may have ended it
            if job and not tale.worker and state.ledger.home(job):
                self._adopt(tale, job, now, state)
        elif isinstance(event, ev.Reported):
            kv = int(self._columns.kv[tale.row])
            held = int(state.ledger.board.jobs.held[tale.row])
            values = (tale.worker, action.output_tokens, held)
            self._stops(tale, now, Kind.EVICTED, values, kv)
        else:
            self._stops(tale, now, Kind.LOST, (tale.worker,), UNWATCHED)

    def _stops(self, tale: Tale, now: float, kind: str, values: Values, kv: int) -> None:
        self._add(tale, now, kind, values)
        self._idle(tale)
        self._watch(tale, kv)

    def _finished(
        self, action: ev.Finish, now: float, event: ev.Event, state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        tale = self.shelf.live.get(action.request_id)
        if tale:
            if action.output_tokens and tale.row in self._unstarted:
                self._starts(tale, action.output_tokens, now)
            self._end(tale, now, Kind.FINISHED, (action,))

    def _refuse(
        self, action: ev.Refuse, now: float, event: ev.Event, state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        """One that was let in, and that no worker there is now can serve."""
        tale = self.shelf.live.get(action.request_id)
        if tale and action.request_id not in state.jobs:
            self._end(tale, now, Kind.REFUSED, (action.reject.message,))
