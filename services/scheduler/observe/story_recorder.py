"""Records requests' stories from the steps of a state, while it serves or from its event log.

    recorder.observe(state.last_step, state)   after every step

This is on the path of every round: a change is a tuple stored in a microsecond or two, and its
sentence is made when it is read. This module interprets each step; `StoryWriter` stores it.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np

from services.core import FinishReason, Plan
from services.policies.decision import Decision, WaitExplanations, WaitReason
from services.policies.snapshot import Bools
from services.scheduler.core import events as ev
from services.scheduler.core.phases import RequestPhase, Transition, TransitionCause
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.story import (
    MAX_NAMES,
    Chapter,
    Kind,
    Numbers,
    OpenStory,
    Story,
    open_story,
)
from services.scheduler.observe.story_writer import (
    IN_HOST,
    NO_KV,
    NOTHING,
    ON_DEVICE,
    UNWATCHED,
    StoryWriter,
)

ADMITTED, QUEUED = int(WaitReason.ADMITTED), int(RequestPhase.QUEUED)  # numpy compares ints faster

AdmittedNumbers = dict[int, tuple[float, float]]  # by row, the numbers of an admission
_NONE_ADMITTED: AdmittedNumbers = {}
_Admits = tuple[tuple[str, ...], int]


class StoryRecorder:
    """Stories of all live requests, and of the last `max_ended` that ended."""

    def __init__(self, max_ended: int):
        self._writer = StoryWriter(max_ended)
        self.store = self._writer.store
        self._decision: Decision | None = None
        self._admits: dict[str, _Admits] = {}  # of this step, by worker; see _admitted_by

    def observe(self, step: ev.Step, state: SchedulerState) -> None:
        match step.event:
            case ev.Forecasted():
                self._forecasted(step.event, step.now, state)
            case ev.Reported():
                self._reported(step.event, step.now, state)
        admitted = _NONE_ADMITTED
        if state.rounds.decision is not self._decision:
            admitted = self._decided(step, state)
        for transition in step.transitions:
            self._changed(transition, step, state, admitted)
        for action in step.actions:
            if isinstance(action, ev.SendPlan) and action.plan.extend:
                self._writer.columns.count_extensions(state.ledger.board.jobs.limit, step.now)
        self._writer.deciding = False
        self._admits = {}

    # Queries

    def story(self, request_id: str, state: SchedulerState) -> Story | None:
        if story := self.store.live.get(request_id):
            return story.story(True, chain(story.written(), self._so_far(story, state)))
        ended = self.store.ended(request_id)
        return ended.story(False, ended.written()) if ended else None

    def _so_far(self, story: OpenStory, state: SchedulerState) -> Iterator[Chapter]:
        """The repeating condition, and the queue position in the last round."""
        if self._writer.columns.repeats[story.row] != NOTHING:
            yield Chapter(*self._writer.pending(story))
        ranking = state.rounds.ranking
        if ranking is None or state.ledger.board.phase[story.row] != QUEUED:
            return
        at = np.flatnonzero(ranking.queued == story.row)
        if len(at):
            key = ranking.key[: ranking.split]
            position = int(np.count_nonzero(key < key[at[0]])) + 1
            at_s = max(self._writer.decided_s, story.last_s)
            yield Chapter(at_s, Kind.POSITION, (position, len(key)))

    # Events

    def _forecasted(self, event: ev.Forecasted, now: float, state: SchedulerState) -> None:
        total = state.ledger.board.jobs.total
        for request_id, forecast in event.forecasts:
            story = self.store.live.get(request_id)
            version = (forecast.source, forecast.version)
            if story and story.forecast != version:
                story.forecast = version
                bounded = forecast.at_least(story.request.min_tokens)
                values = (bounded, total.item(story.row), story.request.max_tokens)
                self._writer.add(story, now, Kind.FORECAST, values)

    def _reported(self, event: ev.Reported, now: float, state: SchedulerState) -> None:
        writer, output = self._writer, state.ledger.board.jobs.output
        if writer.unstarted:
            for row, story in [*writer.unstarted.items()]:
                if (tokens := output.item(row)) > story.request.delivered_tokens:
                    writer.start(story, tokens, now)
        for progress in event.report.evicted:
            evicted = self.store.live.get(progress.request_id)
            if evicted and evicted.runs:
                kv = ON_DEVICE if progress.blocks else IN_HOST
                writer.watch(evicted, kv if progress.held_tokens else NO_KV)
        if writer.watched:
            for row, kv, held in writer.columns.moved_kv(state.ledger.board.jobs):
                self._kv_moved(writer.rows[row], kv, held, now)

    def _kv_moved(self, story: OpenStory, kv: int, held: int, now: float) -> None:
        """The KV of a preempted request went to host memory, returned, or was dropped."""
        before = int(self._writer.columns.kv[story.row])
        self._writer.watch(story, UNWATCHED if story.runs and kv == ON_DEVICE else kv)
        if before == NO_KV:
            return  # it is recomputed
        if kv == NO_KV:
            self._writer.add(story, now, Kind.DROPPED)
        else:
            kind = Kind.SWAPPED_OUT if kv == IN_HOST else Kind.SWAPPED_IN
            self._writer.add(story, now, kind, (held,))

    # Decisions

    def _decided(self, step: ev.Step, state: SchedulerState) -> AdmittedNumbers:
        """Records why requests wait; returns the numbers of the admitted ones."""
        self._decision = decision = state.rounds.decision
        self._writer.begin_round(step.now)
        why = decision.explanations
        if len(why.rows) and isinstance(step.event, ev.Arranged):
            why = why.select(self._current(decision, state))
        return self._reasons(why, step.now) if len(why.rows) else {}

    def _reasons(self, why: WaitExplanations, now: float) -> AdmittedNumbers:
        """A request that the round did not consider, or that has the same reason as before,
        continues to wait. O(rows) in one vectorised pass, and a tuple for each new reason."""
        repeats, stories = self._writer.columns.repeats, self._writer.rows
        changed = (repeats.take(why.rows) != why.reasons).nonzero()[0]
        columns = (
            column.take(changed).tolist()
            for column in (why.rows, why.reasons, why.first_values, why.second_values)
        )
        admitted: AdmittedNumbers = {}
        before = self._writer.rounds - 1
        for row, reason, a, b in zip(*columns, strict=True):
            if reason == ADMITTED:
                admitted[row] = a, b
                continue
            if story := stories.get(row):
                if repeats.item(row) != NOTHING:
                    self._writer.flush(story)
                story.waits = now, before, (reason, a, b)
                repeats[row] = reason
        return admitted

    def _current(self, decision: Decision, state: SchedulerState) -> Bools:
        """Which reasons from a batcher still belong to the request in their row."""
        rows, now_there = decision.explanations.rows, state.ledger.board.jobs.serial
        serials = dict(zip(decision.rows.tolist(), decision.serials.tolist(), strict=True))
        return np.array(
            [row in serials and serials[row] == now_there[row] for row in rows.tolist()], bool
        )

    # Transitions

    def _changed(
        self, t: Transition, step: ev.Step, state: SchedulerState, admitted: AdmittedNumbers
    ) -> None:
        if t.cause is TransitionCause.ARRIVED:
            self._arrived(t, step, state)
            return
        story = self.store.live.get(t.request_id)
        if story is None:
            if t.after is RequestPhase.NONE:
                self._refused_on_arrival(t, step.event, state)
            return
        match t.cause:
            case TransitionCause.PLACED:
                self._placed(story, t, state, admitted.get(story.row))
            case TransitionCause.RESUMED:
                self._resumed(story, t, state, admitted.get(story.row))
            case TransitionCause.ADOPTED:
                self._adopted(story, t, state)
            case TransitionCause.REJOINED:
                story.link = state.jobs[t.request_id].link
                self._writer.add(story, t.at_s, Kind.REJOINED)
            case TransitionCause.PAUSED | TransitionCause.EVICTED | TransitionCause.LOST:
                self._stopped(story, t, step.actions)
            case _ if t.after is RequestPhase.NONE:
                self._ended(story, t)

    def _arrived(self, t: Transition, step: ev.Step, state: SchedulerState) -> None:
        job = state.jobs.get(t.request_id)
        if job is None:
            return  # it ends in this step; see _refused_on_arrival
        others = state.ledger.waiting - 1
        story = open_story(job.request, job.link, t.at_s, others)
        self._writer.open(story, job.row, len(state.ledger.board.phase))

    def _refused_on_arrival(self, t: Transition, event: ev.Event, state: SchedulerState) -> None:
        """A request that was not accepted, or that came after its deadline."""
        if isinstance(event, ev.Submitted) and event.request.request_id == t.request_id:
            story = open_story(event.request, event.link, t.at_s, state.ledger.waiting)
            story.add((t.at_s, Kind.REFUSED, (t.message,)))
            self.store.refuse(story)

    def _placed(
        self, story: OpenStory, t: Transition, state: SchedulerState, numbers: Numbers
    ) -> None:
        limit = self._writer.run(story, state.ledger.board.jobs.limit)
        if story.worker and story.worker != t.worker_id:
            moved = (story.worker, t.worker_id, limit, numbers)
            self._writer.add(story, t.at_s, Kind.MOVED, moved)
        elif story.worker:
            self._writer.add(story, t.at_s, Kind.RESUMED, (t.worker_id, limit, 0, numbers))
        else:
            self._writer.add(story, t.at_s, Kind.PLACED, (t.worker_id, limit, numbers))
            self._writer.unstarted[story.row] = story
        story.worker = t.worker_id
        if story.watched:
            self._writer.watch(story, UNWATCHED)

    def _resumed(
        self, story: OpenStory, t: Transition, state: SchedulerState, numbers: Numbers
    ) -> None:
        limit = self._writer.run(story, state.ledger.board.jobs.limit)
        values = (story.worker, limit, t.held_tokens, numbers)
        self._writer.add(story, t.at_s, Kind.RESUMED, values)
        if self._writer.columns.kv[story.row] != IN_HOST:
            self._writer.watch(story, UNWATCHED)

    def _adopted(self, story: OpenStory, t: Transition, state: SchedulerState) -> None:
        runs = t.after is RequestPhase.RUNNING
        story.worker = t.worker_id
        self._writer.add(story, t.at_s, Kind.ADOPTED, (t.worker_id, t.output_tokens, runs))
        if runs:
            self._writer.run(story, state.ledger.board.jobs.limit)

    def _stopped(self, story: OpenStory, t: Transition, actions: Sequence[ev.Action]) -> None:
        writer = self._writer
        if t.cause is TransitionCause.PAUSED:
            if t.worker_id not in self._admits:
                self._admits[t.worker_id] = _admitted_by(actions, t.worker_id)
            values = (t.worker_id, t.output_tokens, *self._admits[t.worker_id])
            writer.stop(story, t.at_s, Kind.PAUSED, values, ON_DEVICE)
        elif t.cause is TransitionCause.EVICTED:
            kv = int(writer.columns.kv[story.row])
            evicted = (story.worker, t.output_tokens, t.held_tokens)
            writer.stop(story, t.at_s, Kind.EVICTED, evicted, kv)
        else:
            writer.stop(story, t.at_s, Kind.LOST, (story.worker,), UNWATCHED)

    def _ended(self, story: OpenStory, t: Transition) -> None:
        """A request refused under the id of a live one leaves the story of the live one open."""
        writer = self._writer
        match t.cause:
            case TransitionCause.FINISHED:
                if t.output_tokens and story.row in writer.unstarted:
                    writer.start(story, t.output_tokens, t.at_s)
                writer.end(story, t.at_s, Kind.FINISHED, (t,))
            case TransitionCause.CANCELLED:
                kind = Kind.CANCELLED if t.reason == FinishReason.CANCELLED else Kind.STOPPED
                writer.end(story, t.at_s, kind, (t.output_tokens,))
            case TransitionCause.REFUSED:
                if t.before is not RequestPhase.NONE:
                    writer.end(story, t.at_s, Kind.REFUSED, (t.message,))
            case _:
                writer.end(story, t.at_s, Kind.LEFT)


def _admitted_by(actions: Sequence[ev.Action], worker_id: str) -> _Admits:
    """Requests that the worker's plan of this step admits: the first few, and how many more."""
    plans: Iterator[Plan] = (
        a.plan for a in actions if isinstance(a, ev.SendPlan) and a.worker_id == worker_id
    )
    admits = [grant.request_id for plan in plans for grant in plan.admit]
    return tuple(islice(admits, MAX_NAMES)), max(0, len(admits) - MAX_NAMES)
