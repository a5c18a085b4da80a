"""The simulation: the served scheduler and workers, driven by one queue of events.

    arrival → scheduler → plan → worker → report → scheduler → … until every request has ended

The scheduler is `SchedulerState` with its rounds; each worker is a `WorkerState` behind a cost
model (worker.py). This module adds the way of messages and the time of rounds and forecasts.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from services.core import FinishReason, Outcome, Request
from services.runtime.prefix import prompt_hashes
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.populations import live_answers, shared_representatives
from services.scheduler.core.state import SchedulerState
from services.worker.requests.types.batch import NewToken
from services.worker.requests.types.prompt import Prompt
from simulator.engine.events import (
    Arrival,
    Event,
    EventQueue,
    Refresh,
    SpanEnd,
    ToScheduler,
    ToWorker,
    Wake,
)
from simulator.engine.forecaster import Forecaster, build_forecaster
from simulator.engine.observations import Observations
from simulator.engine.records import Records, WorkerUsage
from simulator.engine.settings import MODEL, RunSettings
from simulator.engine.worker import MORE, SimWorker, WorkerOptions
from simulator.workload.content import contents_of
from simulator.workload.workload import Workload

GATEWAY = "gateway#1"
RARE_COLLECTIONS = 100_000  # new objects between two collections; Python's default is 700


class Stalled(RuntimeError):
    """No event is left and requests have not ended: a defect of a policy or of the simulator."""


@dataclass(frozen=True)
class RunResult:
    """What a run left: its records, what its workers did, the time of its last event, and what was
    observed if the settings ask for it."""

    settings: RunSettings
    workload: Workload
    records: Records
    usages: tuple[WorkerUsage, ...]
    end_s: float
    rounds: int
    events: int
    observations: Observations | None = None


class Simulation:
    """One run. Raises ValueError if the preset's predictor cannot be simulated on this workload.

    `on_step` receives every step of the scheduler, as an event log does; reports then have the
    times of steps. `advice` are forecasts and cost models with the times at which the scheduler
    receives them; the predictor then stays silent. `slowdowns` has a factor of step times for each
    worker, by the time at which steps begin. Workers are named `w0`, `w1`, and so on.
    """

    def __init__(
        self,
        settings: RunSettings,
        workload: Workload,
        on_step: Callable[[ev.Step], None] | None = None,
        advice: Sequence[tuple[float, ev.Event]] | None = None,
        slowdowns: Sequence[Callable[[float], float]] = (),
    ):
        self.settings, self.workload = settings, workload
        self._on_step, self._advice = on_step, advice
        self._inputs = workload.input_tokens.tolist()
        self._most = settings.caps_of(workload).tolist()
        # What the server generates: it stops at max_tokens.
        answers = np.minimum(workload.output_tokens, self._most)
        self._answers = answers.tolist()
        self._content = contents_of(workload)
        self.records = Records(len(workload))
        self._observations = Observations(settings.observe, answers) if settings.observe else None
        self._timing = settings.timing
        self._queue = EventQueue()
        self._forecaster: Forecaster | None = None
        if advice is None:
            self._forecaster = build_forecaster(settings, workload, self._answer_tokens)
        self._encodes = self._forecaster is not None and self._forecaster.encodes
        self._encoder_free_s = 0.0
        patience_s = self._timing.patience_s
        if self._encodes:
            patience_s = max(patience_s, self._timing.encoder_patience_s)
        limits = SchedulerLimits(settings.max_queue, patience_s=patience_s)
        self._state = SchedulerState(settings.preset, limits)
        options = WorkerOptions(settings.jumps, self._content is not None, on_step is not None)
        self._workers = [
            SimWorker(
                number,
                hardware,
                workload.input_tokens + answers,
                options,
                slowdowns[number] if slowdowns else None,
            )
            for number, hardware in enumerate(settings.effective_hardware)
        ]
        self._numbers = {f"w{worker.number}": worker.number for worker in self._workers}
        self._now = 0.0
        self._open = len(workload)
        self._wake_s = inf  # the time of the earliest Wake in the queue
        self._rest_until_s = 0.0
        self._round_s = 0.0  # of the last round
        self._outcomes: list[Outcome] = []  # since the last refresh
        self._next_row = 0  # of a closed loop
        self._events = 0

    def run(self) -> RunResult:
        """Runs until every request has ended, or `stop_after`, and with `on_step` until the
        scheduler knows. Raises Stalled if some never can."""
        self._attach_workers()
        for time_s, advice in self._advice or ():
            self._queue.push(time_s, ToScheduler(advice))
        self._begin_arrivals()
        left = len(self.workload) - (self.settings.stop_after or len(self.workload))
        while self._open > left or (self._on_step and self._state.jobs):
            if not self._queue:
                raise Stalled(f"{self._open} of {len(self.workload)} requests never ended")
            self._now, event = self._queue.pop()
            self._events += 1
            self._handle(event)
        self.records.reach_client(self._timing.hop_s)
        usages = tuple(worker.total_usage() for worker in self._workers)
        if self._observations:
            self._observations.timelines.finish(self._now)
        return RunResult(
            self.settings,
            self.workload,
            self.records,
            usages,
            self._now,
            self._state.rounds.number,
            self._events,
            self._observations,
        )

    def _answer_tokens(self, request_id: str) -> int:
        answer: int = self._answers[int(request_id)]
        return answer

    def _handle(self, event: Event) -> None:
        match event:
            case ToWorker():
                self._command(event)
            case SpanEnd():
                self._end_span(event)
            case ToScheduler():
                self._dispatch(event.event)
            case Arrival():
                self._arrive(event.row)
            case Refresh():
                self._refresh()
            case Wake():
                self._wake()

    # Requests

    def _attach_workers(self) -> None:
        for worker in self._workers:
            name = f"w{worker.number}"
            view = worker.hardware.view(name, MODEL)
            self._dispatch(ev.WorkerAttached(f"{name}#1", view))
            self._dispatch(ev.Costed(name, worker.hardware.cost))

    def _begin_arrivals(self) -> None:
        if self.workload.clients:
            self._next_row = min(self.workload.clients, len(self.workload))
            for row in range(self._next_row):
                self._queue.push(0.0, Arrival(row))
        else:
            self._queue.push(float(self.workload.arrival_s[0]), Arrival(0))

    def _arrive(self, row: int) -> None:
        if not self.workload.clients and row + 1 < len(self.workload):
            self._queue.push(float(self.workload.arrival_s[row + 1]), Arrival(row + 1))
        self.records.arrival_s[row] = self._now
        self._dispatch(ev.Submitted(GATEWAY, self._request(row)))

    def _request(self, row: int) -> Request:
        if self.workload.requests:
            return replace(self.workload.requests[row], request_id=str(row), model=MODEL)
        return Request(
            str(row),
            MODEL,
            self._inputs[row],
            self._most[row],
            self._now,
            sla=self.settings.sla,
            prefix_hashes=self._prefix_hashes(row),
        )

    def _end_request(self) -> None:
        """A request has ended; in a closed loop, its client sends the next one."""
        self._open -= 1
        if self.workload.clients and self._next_row < len(self.workload):
            self._queue.push(self._now + self._timing.hop_s, Arrival(self._next_row))
            self._next_row += 1

    # The scheduler

    def _dispatch(self, event: ev.Event, delay_s: float = 0.0) -> None:
        """Steps the scheduler; its messages leave after `delay_s`."""
        actions = self._state.step(event, self._now)
        if self._on_step:
            self._on_step(self._state.last_step)
        for action in actions:
            self._perform(action, self._now + delay_s)
        if self._observations:
            self._observations.timelines.add(self._state.last_step.transitions)
        self._schedule_wake()

    def _perform(self, action: ev.Action, at_s: float) -> None:
        hop_s = self._timing.hop_s
        match action:
            case ev.SendPlan():
                worker = self._numbers[action.worker_id]
                self._queue.push(at_s + hop_s, ToWorker(worker, action.plan))
            case ev.Place():  # to the gateway, which sends the prompt
                worker = self._numbers[action.worker_id]
                prompt = self._prompt(action.request_id)
                self._queue.push(at_s + 2 * hop_s, ToWorker(worker, prompt))
            case ev.Preempt():
                self.records.preemptions[int(action.request_id)] += 1
            case ev.AskForecast() if self._forecaster:
                forecasts = self._forecaster.forecast(action.requests)
                answers = tuple(
                    (request.request_id, forecast.truncated(request.max_tokens))
                    for request, forecast in zip(action.requests, forecasts, strict=True)
                )
                if self._observations:
                    self._observations.forecasts.add(answers)
                answered_s = self._encode(action.requests, at_s) + self._timing.forecast_s
                self._queue.push(answered_s, ToScheduler(ev.Forecasted(answers)))
            case ev.Learn() if self._forecaster:
                if not self._outcomes:
                    self._queue.push(at_s + self._timing.refresh_s, Refresh())
                self._outcomes.append(action.outcome)
            case ev.Refuse():
                self.records.rejected[int(action.request_id)] = True
                self._end_request()
            case _:
                pass  # for clients and observers

    def _encode(self, requests: Sequence[Request], at_s: float) -> float:
        """When these requests' prompts are read, after those before them."""
        if not self._encodes:
            return at_s
        start_s = max(self._encoder_free_s, at_s)
        self._encoder_free_s = start_s + len(requests) * self._timing.encode_s
        return self._encoder_free_s

    def _prompt(self, request_id: str) -> Prompt:
        """The prompt with the tokens that the gateway has delivered."""
        row = int(request_id)
        prompt_tokens, output = self._inputs[row], int(self.records.tokens[row])
        length = prompt_tokens + output
        token_ids = self._content(row) + [MORE] * output if self._content else bytes(length)
        return Prompt(request_id, token_ids, prompt_tokens, self._most[row])

    def _prefix_hashes(self, row: int) -> tuple[int, ...]:
        """Hashes of the prompt's first blocks, if the scheduler places by them."""
        most = self._state.rounds.prefix_blocks
        if not (most and self._content):
            return ()
        block_tokens = self.settings.hardware[0].block_tokens
        return tuple(prompt_hashes(self._content(row), most, block_tokens, salt=""))

    def _refresh(self) -> None:
        """The predictor learns what has ended and how long live answers are, as in one Observe."""
        outcomes, self._outcomes = self._outcomes, []
        if self._forecaster is None:
            return
        for outcome in outcomes:
            self._forecaster.learn(outcome, self._now)
        self._forecaster.observe_live(live_answers(self._state.ledger))
        if requests := shared_representatives(self._state.ledger):
            shared = tuple(f for f in self._forecaster.forecast(requests) if f.shared_key)
            self._dispatch(ev.Refreshed(shared))

    def _schedule_wake(self) -> None:
        round_s = max(self._now, self._state.round_due_s, self._rest_until_s)
        round_s += self._timing.wake_s
        due_s = max(self._now, min(round_s, self._state.next_deadline()))
        if due_s < self._wake_s:
            self._wake_s = due_s
            self._queue.push(due_s, Wake())

    def _wake(self) -> None:
        if self._now < self._wake_s:
            return  # an earlier one has come since
        self._wake_s = inf
        if self._state.next_deadline() <= self._now:
            self._dispatch(ev.Tick())
        if max(self._state.round_due_s, self._rest_until_s) <= self._now:
            timing = self._timing
            took_s = timing.round_s + timing.round_job_s * len(self._state.jobs)
            self._rest_until_s = self._now + took_s / timing.round_share
            previous_s, self._round_s = self._round_s, took_s
            self._dispatch(ev.Round(previous_s), took_s)
            if self._observations and self._observations.memory.count_round():
                held = [worker.kv_tokens_at(self._now) for worker in self._workers]
                self._observations.sample_memory(self._state, self._now, held)
        else:
            self._schedule_wake()

    # Workers

    def _command(self, event: ToWorker) -> None:
        worker = self._workers[event.worker]
        if shorter := worker.receive(event.command, self._now):
            self._queue.push(shorter.end_s, SpanEnd(worker.number, shorter.number))
        elif worker.span is None:
            self._turn(worker)

    def _end_span(self, event: SpanEnd) -> None:
        worker = self._workers[event.worker]
        if worker.span is None or worker.span.number != event.number:
            return
        result = worker.finish()
        if len(result.rows):
            self.records.on_tokens(result.rows, result.times_s)
        if len(result.drawn):
            self.records.on_tokens(result.drawn, np.array([self._now]))
        self._end_answers(result.tokens)
        self._report(worker)
        self._turn(worker)

    def _turn(self, worker: SimWorker) -> None:
        """Handles the worker's commands and begins its next span."""
        for arrives_s, upload in worker.begin(self._now):
            self._queue.push(arrives_s, ToWorker(worker.number, upload))
        if late := worker.pop_late():
            rows = np.array([int(token.request_id) for token in late], np.int64)
            self.records.on_tokens(rows, np.array([self._now]))
            self._end_answers(late)
        if worker.span:
            self._queue.push(worker.span.end_s, SpanEnd(worker.number, worker.span.number))
        else:
            self._report(worker)

    def _report(self, worker: SimWorker) -> None:
        if report := worker.report():
            name = f"w{worker.number}"
            for evicted in report.evicted:
                self.records.evictions[int(evicted.request_id)] += 1
            reported = ToScheduler(ev.Reported(f"{name}#1", name, report), worker.number)
            self._queue.push(self._now + self._timing.hop_s, reported)

    def _end_answers(self, tokens: list[NewToken]) -> None:
        """The requests of which these are the last tokens have ended."""
        for token in tokens:
            if token.finish in (FinishReason.STOP, FinishReason.LENGTH):
                self.records.finished[int(token.request_id)] = True
                self._end_request()


def simulate(settings: RunSettings, workload: Workload) -> RunResult:
    """Runs a workload. Raises ValueError for a workload that the settings cannot serve."""
    simulation = Simulation(settings, workload)
    with _rare_collections():
        return simulation.run()


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Lets the garbage collector search for cycles rarely: a run makes nearly none, and each search
    visits every token of every live request."""
    before = gc.get_threshold()
    gc.set_threshold(RARE_COLLECTIONS, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
