"""Tells requests' stories from the steps of a state: beside it while it serves, or from its log.

    recorder.tell(event, now, actions, state)   after every step

It stands on the path of every round, so it does little: a change is a tuple noted, in a
microsecond or two, and its sentence is made when somebody reads it. Here is what each step means;
`StoryWriter` keeps what is written.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from itertools import chain, islice

import numpy as np

from services.core import FinishReason
from services.policies.decision import Decision, WaitExplanations, WaitReason
from services.policies.slice import SLICES
from services.policies.snapshot import Bools
from services.scheduler.core import events as ev
from services.scheduler.core.board import RequestPhase
from services.scheduler.core.jobs import Job
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.story import MOST_NAMES, Chapter, Kind, OpenStory, Story
from services.scheduler.observe.story_columns import (
    IDLE,
    IN_HOST,
    NO_KV,
    NOTHING,
    ON_DEVICE,
    UNWATCHED,
)
from services.scheduler.observe.story_writer import StoryWriter

ADMITTED, QUEUED = (
    int(WaitReason.ADMITTED),
    int(RequestPhase.QUEUED),
)  # numpy compares these much faster
DECIDE = ("round", "arranged")  # events
OF_ONE = (ev.Place, ev.Resume, ev.Preempt, ev.Finish, ev.Refuse)  # actions, of one request

Admitted = dict[int, tuple[float, float]]  # by row, the numbers of its admission
_NOBODY: Admitted = {}


class StoryRecorder:
    """Stories of all live requests, and of the last `ended_most` that have ended."""

    def __init__(self, ended_most: int):
        self._notes = StoryWriter(ended_most)
        self.store = self._notes.store
        self._decision: Decision | None = None
        self._events: dict[str, Callable[..., None]] = {
            "submitted": self._submitted,
            "forecasted": self._forecasted,
            "reported": self._reported,
        }
        self._actions: dict[type, Callable[..., None]] = {
            ev.Place: self._placed,
            ev.Resume: self._resumed,
            ev.Preempt: self._preempted,
            ev.Finish: self._finished,
            ev.Refuse: self._refuse,
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
            admitted = self._decided(event, now, state)
        for action in actions:
            if isinstance(action, ev.SendPlan):
                self._planned(action, now, state)
            elif isinstance(action, OF_ONE) and (tale := self.store.live.get(action.request_id)):
                self._actions[type(action)](tale, action, now, event, state, admitted)
        if after := self._after.get(event.kind):
            after(event, now, state)
        self._notes.deciding = False

    # What is asked

    def story(self, request_id: str, state: SchedulerState) -> Story | None:
        tale = self.store.live.get(request_id)
        if tale:
            return tale.story(True, chain(tale.told(), self._so_far(tale, state)))
        tale = self.store.over(request_id)
        return tale.story(False, tale.told()) if tale else None

    def _so_far(self, tale: OpenStory, state: SchedulerState) -> Iterator[Chapter]:
        """What repeats itself, and where one that waits stands by the last round."""
        if self._notes.columns.repeats[tale.row] != NOTHING:
            yield Chapter(*self._notes.pending(tale))
        ranking = state.rounds.ranking
        if ranking is None or state.ledger.board.phase[tale.row] != QUEUED:
            return
        at = np.flatnonzero(ranking.queued == tale.row)
        if len(at):
            key = ranking.key[: ranking.split]
            place = int(np.count_nonzero(key < key[at[0]])) + 1
            yield Chapter(max(self._notes.decided_s, tale.last_s), Kind.LINE, (place, len(key)))

    # Events

    def _submitted(
        self, event: ev.Submitted, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        asked = event.request
        job, known = state.jobs.get(asked.request_id), self.store.live.get(asked.request_id)
        if known and known.link == event.link:
            return  # refused for its name; the one that has it goes on
        if known and job and job.request is not asked:
            known.link = event.link
            self._notes.add(known, now, Kind.REJOINED)
            return
        if known:
            self._notes.end(known, now, Kind.LEFT)
        others = state.ledger.waiting - (job is not None)
        tale = OpenStory(asked, event.link, [(now, Kind.ARRIVED, (asked, now, others))])
        if job:
            self._notes.begin(tale, job.row, len(state.ledger.board.phase))
            return
        [message] = {
            a.message if isinstance(a, ev.Finish) else a.reject.message  # its deadline had passed
            for a in actions
            if isinstance(a, ev.Refuse | ev.Finish) and a.request_id == asked.request_id
        }
        tale.add((now, Kind.REFUSED, (message,)))
        self.store.refuse(tale)

    def _forecasted(
        self, event: ev.Forecasted, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        total = state.ledger.board.jobs.total
        for request_id, forecast in event.forecasts:
            tale = self.store.live.get(request_id)
            told = (forecast.source, forecast.version)
            if tale and tale.forecast != told:
                tale.forecast = told
                self._notes.add(
                    tale,
                    now,
                    Kind.FORECAST,
                    (forecast, total.item(tale.row), tale.request.max_tokens),
                )

    def _reported(
        self, event: ev.Reported, now: float, actions: Sequence[ev.Action], state: SchedulerState
    ) -> None:
        output = state.ledger.board.jobs.output
        if self._notes.unstarted:
            for row, tale in [*self._notes.unstarted.items()]:
                if (made := output.item(row)) > tale.request.delivered_tokens:
                    self._notes.starts(tale, made, now)
        for told in event.report.evicted:
            evicted = self.store.live.get(told.request_id)
            if evicted and evicted.runs:
                kv = NO_KV if not told.held_tokens else ON_DEVICE if told.blocks else IN_HOST
                self._notes.watch(evicted, kv)
        if self._notes.watched:
            self._follow_kv(now, state)
        if SLICES[state.preset.slice].returns:
            self._returned({told.request_id for told in event.report.evicted}, now, state)

    def _follow_kv(self, now: float, state: SchedulerState) -> None:
        """KV of those that were preempted: gone to host memory, back, or dropped."""
        for row, kv, held in self._notes.columns.shifted(state.ledger.board.jobs):
            self._shifted(self._notes.rows[row], kv, held, now)

    def _shifted(self, tale: OpenStory, kv: int, held: int, now: float) -> None:
        before = int(self._notes.columns.kv[tale.row])
        self._notes.watch(tale, UNWATCHED if tale.runs and kv == ON_DEVICE else kv)
        if before == NO_KV:
            return  # it is made anew
        if kv == NO_KV:
            self._notes.add(tale, now, Kind.DROPPED)
        else:
            kind = Kind.SWAPPED_OUT if kv == IN_HOST else Kind.SWAPPED_IN
            self._notes.add(tale, now, kind, (held,))

    def _returned(self, evicted: Set[str], now: float, state: SchedulerState) -> None:
        """Who ran, waits again, and was not stopped: its slice is made."""
        board = state.ledger.board
        runs = self._notes.columns.limit < IDLE
        for row in np.flatnonzero(runs & (board.phase[: len(runs)] == QUEUED)).tolist():
            tale = self._notes.rows[row]
            if tale.request.request_id not in evicted:
                values = (tale.worker, int(board.jobs.output[row]))
                self._notes.stops(tale, now, Kind.RETURNED, values, ON_DEVICE)

    def _cancelled(self, event: ev.Cancelled, now: float, state: SchedulerState) -> None:
        tale = self.store.live.get(event.request_id)
        if tale and tale.link == event.link and event.request_id not in state.jobs:
            cancelled = event.reason is FinishReason.CANCELLED
            kind = Kind.CANCELLED if cancelled else Kind.STOPPED
            self._notes.end(tale, now, kind, (event.output_tokens,))

    def _gateway_lost(self, event: ev.GatewayLost, now: float, state: SchedulerState) -> None:
        for tale in [tale for tale in self.store.live.values() if tale.link == event.link]:
            self._notes.end(tale, now, Kind.LEFT)

    # Decisions

    def _decided(self, event: ev.Event, now: float, state: SchedulerState) -> Admitted:
        """What a round found of those who wait; and the numbers of those it admitted."""
        self._decision = decision = state.rounds.decision
        self._notes.decide(now)
        why = decision.explanations
        if len(why.rows) and event.kind == "arranged":
            why = why.select(self._current(decision, state))
        return self._reasons(why, now) if len(why.rows) else {}

    def _reasons(self, why: WaitExplanations, now: float) -> Admitted:
        """Who waits for the same reason as before waits on, as does who is not looked at for a
        while. O(rows) in one pass of numpy, and a tuple or two for each of those with another."""
        repeats, tales = self._notes.columns.repeats, self._notes.rows
        other = (repeats.take(why.rows) != why.reasons).nonzero()[0]
        columns = (
            column.take(other).tolist()
            for column in (why.rows, why.reasons, why.first_values, why.second_values)
        )
        admitted: Admitted = {}
        before = self._notes.rounds - 1
        for row, reason, a, b in zip(*columns, strict=True):
            if reason == ADMITTED:
                admitted[row] = a, b
                continue
            if tale := tales.get(row):
                if repeats.item(row) != NOTHING:
                    self._notes.flush(tale)
                tale.waits = now, before, (reason, a, b)
                repeats[row] = reason
        return admitted

    def _current(self, decision: Decision, state: SchedulerState) -> Bools:
        """Of the reasons of a batcher of its own: whether they are of who waits there now."""
        board, rows = state.ledger.board, decision.explanations.rows
        serials = dict(zip(decision.rows.tolist(), decision.serials.tolist(), strict=True))
        now_there = board.jobs.serial
        return np.array(
            [row in serials and serials[row] == now_there[row] for row in rows.tolist()], bool
        )

    # Actions

    def _placed(
        self, tale: OpenStory, action: ev.Place, now: float, event: ev.Event,
        state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        there, here = tale.worker, action.worker_id
        limit = self._notes.runs(tale, state.ledger.board.jobs.limit)
        numbers = admitted.get(tale.row)
        if there and there != here:
            self._notes.add(tale, now, Kind.MOVED, (there, here, limit, numbers))
        elif there:
            self._notes.add(tale, now, Kind.RESUMED, (here, limit, 0, numbers))
        else:
            self._notes.add(tale, now, Kind.PLACED, (here, limit, numbers))
            self._notes.unstarted[tale.row] = tale
        tale.worker = here
        if tale.watched:
            self._notes.watch(tale, UNWATCHED)

    def _resumed(
        self, tale: OpenStory, action: ev.Resume, now: float, event: ev.Event,
        state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        """Again where its tokens are; where no round said so, it was taken over there."""
        if event.kind in DECIDE:
            limit = self._notes.runs(tale, state.ledger.board.jobs.limit)
            values = (tale.worker, limit, action.held_tokens, admitted.get(tale.row))
            self._notes.add(tale, now, Kind.RESUMED, values)
            if self._notes.columns.kv[tale.row] != IN_HOST:
                self._notes.watch(tale, UNWATCHED)
        elif not tale.runs and (job := state.jobs.get(action.request_id)):
            self._adopt(tale, job, now, state)
            self._notes.runs(tale, state.ledger.board.jobs.limit)

    def _adopt(self, tale: OpenStory, job: Job, now: float, state: SchedulerState) -> None:
        tale.worker = state.ledger.home(job)
        runs = state.ledger.phase(job) is RequestPhase.RUNNING
        values = (tale.worker, state.ledger.output(job), runs)
        self._notes.add(tale, now, Kind.ADOPTED, values)

    def _planned(self, action: ev.SendPlan, now: float, state: SchedulerState) -> None:
        plan = action.plan
        if plan.extend:
            self._notes.columns.extended(state.ledger.board.jobs.limit, now)
        for pause in plan.pause:
            tale = self.store.live.get(pause.request_id)
            if tale is None:
                continue
            others = tuple(grant.request_id for grant in islice(plan.admit, MOST_NAMES))
            output = int(state.ledger.board.jobs.output[tale.row])
            values = (action.worker_id, output, others, len(plan.admit) - len(others))
            self._notes.stops(tale, now, Kind.PAUSED, values, ON_DEVICE)

    def _preempted(
        self, tale: OpenStory, action: ev.Preempt, now: float, event: ev.Event,
        state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        """Of those that ran: evicted, or lost with their worker. A pause was told with its plan."""
        if not tale.runs:
            job = state.jobs.get(action.request_id)  # what is told may have ended it
            if job and not tale.worker and state.ledger.home(job):
                self._adopt(tale, job, now, state)
        elif isinstance(event, ev.Reported):
            kv = int(self._notes.columns.kv[tale.row])
            held = int(state.ledger.board.jobs.held[tale.row])
            values = (tale.worker, action.output_tokens, held)
            self._notes.stops(tale, now, Kind.EVICTED, values, kv)
        else:
            self._notes.stops(tale, now, Kind.LOST, (tale.worker,), UNWATCHED)

    def _finished(
        self, tale: OpenStory, action: ev.Finish, now: float, event: ev.Event,
        state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        if action.output_tokens and tale.row in self._notes.unstarted:
            self._notes.starts(tale, action.output_tokens, now)
        self._notes.end(tale, now, Kind.FINISHED, (action,))

    def _refuse(
        self, tale: OpenStory, action: ev.Refuse, now: float, event: ev.Event,
        state: SchedulerState,
        admitted: Admitted,
    ) -> None:  # fmt: skip
        """One that was let in, and that no worker there is now can serve."""
        if action.request_id not in state.jobs:
            self._notes.end(tale, now, Kind.REFUSED, (action.reject.message,))
