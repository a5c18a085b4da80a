"""A recorded run: everything that a twin needs, read from the steps of a scheduler.

The steps come from an event log or from a simulation. Both are read by the same code, so that a
token's time means the same on both sides: the end of its step and the way of a report to the
scheduler.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import NamedTuple

import numpy as np

from services.core import Completion, FinishReason, Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import Ints
from services.policies.preset import Preset
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.phases import Transition, TransitionCause
from services.scheduler.observe.event_log import read, read_head
from simulator.engine.records import Records
from simulator.engine.settings import Timing
from simulator.twin.control_plane import ControlPlaneClock
from simulator.twin.step_ends import WorkerSteps
from simulator.workload.workload import Workload

COMPLETE = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True)
class RecordedRun:
    """A run of one model. Times count from the first worker's hello.

    `workload` and `records` have the requests that finished, by submission; `ids` are their ids.
    `left_out` counts the others: refused, cancelled, or alive at the end of the log. `advice` are
    the forecasts and cost models that the scheduler received, for requests and workers by their
    place. `costs` are the last cost models, `steps` the measured steps, both by worker. `origin_s`
    is the time of the hello on the scheduler's clock, which `steps` have.
    """

    workers: tuple[WorkerView, ...]
    workload: Workload
    records: Records
    ids: tuple[str, ...]
    left_out: int
    advice: tuple[tuple[float, ev.Event], ...]
    costs: tuple[CostModel | None, ...]
    steps: tuple[WorkerSteps, ...]
    timing: Timing
    origin_s: float

    @property
    def places(self) -> Ints:
        """The place of each request of a twin in the recorded run."""
        return np.array([int(name) for name in self.ids])


@dataclass(slots=True)
class _Progress:
    """A submitted request; `row` is its place in the submission order."""

    row: int
    submitted_s: float
    request: Request
    output_tokens: int = 0
    finished: bool = False
    placed_s: float = inf  # first
    prefill: tuple[WorkerSteps, int] | None = None  # the place of the step of its first token


class _Tokens(NamedTuple):
    """Each of these rows has drawn a token in each of the `new` steps before the step `last`."""

    steps: WorkerSteps
    last: int
    new: int
    rows: Ints


@dataclass
class RunReader:
    """Reads a run step by step. `build` returns it."""

    name: str
    _requests: dict[str, _Progress] = field(default_factory=dict)
    _workers: dict[str, WorkerView] = field(default_factory=dict)
    _attached_s: dict[str, float] = field(default_factory=dict)
    _lost: dict[str, float] = field(default_factory=dict)
    _steps: dict[str, WorkerSteps] = field(default_factory=dict)
    _costs: dict[str, CostModel] = field(default_factory=dict)
    _advice: list[tuple[float, ev.Event]] = field(default_factory=list)
    _tokens: list[_Tokens] = field(default_factory=list)
    _clock: ControlPlaneClock = field(default_factory=ControlPlaneClock)

    def observe(self, step: ev.Step) -> None:
        """Takes the next step. O(actions + reported requests)."""
        match step.event:
            case ev.Submitted(request=request):
                if request.request_id not in self._requests:  # else resubmitted after a fault
                    row = len(self._requests)
                    self._requests[request.request_id] = _Progress(row, step.now, request)
            case ev.WorkerAttached(view=view):
                self._workers[view.worker_id] = view
                self._attached_s.setdefault(view.worker_id, step.now)
                self._steps.setdefault(view.worker_id, WorkerSteps())
            case ev.WorkerLost(worker_id=worker_id):
                self._lost[worker_id] = step.now
            case ev.Costed(worker_id=worker_id, cost=cost):
                self._costs[worker_id] = cost
                self._advice.append((step.now, step.event))
            case ev.Forecasted() | ev.Refreshed():
                self._advice.append((step.now, step.event))
            case ev.Reported(worker_id=worker_id, report=report) if worker_id in self._steps:
                self._steps[worker_id].on_report(report, step.now)
                self._reported(self._steps[worker_id], report)
            case _:
                pass
        for transition in step.transitions:
            self._changed(transition)
        self._clock.observe(step)

    def _changed(self, transition: Transition) -> None:
        known = self._requests.get(transition.request_id)
        if known and transition.cause is TransitionCause.PLACED:
            known.placed_s = min(known.placed_s, transition.at_s)
        if steps := self._steps.get(transition.worker_id):
            steps.observe(transition)

    def _reported(self, steps: WorkerSteps, report: Report) -> None:
        """Gives the tokens that are new in a report the ends of the worker's last steps."""
        groups: dict[int, list[int]] = {}  # rows by their number of new tokens
        reported: tuple[RequestProgress | Completion, ...]
        reported = (*report.progress, *report.evicted, *report.finished)
        for progress in reported:
            known = self._requests.get(progress.request_id)
            if known and progress.output_tokens > known.output_tokens:
                new = progress.output_tokens - known.output_tokens
                if not known.output_tokens and len(steps.timings) >= new:
                    known.prefill = steps, len(steps.timings) - new
                known.output_tokens = progress.output_tokens
                groups.setdefault(new, []).append(known.row)
        for completion in report.finished:
            known = self._requests.get(completion.request_id)
            if known and steps.timings:  # else its tokens have no times
                known.finished = completion.reason in COMPLETE
        if last := len(steps.timings):
            self._tokens += [
                _Tokens(steps, last, new, np.array(rows, np.int64)) for new, rows in groups.items()
            ]

    def build(self) -> RecordedRun:
        """Returns the run. Raises ValueError with the reason if nothing finished, for several
        models, and for a worker that left before the end."""
        done = [known for known in self._requests.values() if known.finished]
        if not done:
            raise ValueError(f"{self.name} has no finished request")
        if len(models := {known.request.model for known in done}) > 1:
            raise ValueError(
                f"{self.name} has requests of several models ({', '.join(sorted(models))}); a twin "
                "simulates one: record each model by itself"
            )
        [model] = models
        views = {name: view for name, view in self._workers.items() if view.model == model}
        origin_s = min(self._attached_s[name] for name in views)
        rows = np.array([known.row for known in done])
        records = self._records(len(self._requests), origin_s).select(rows)
        end_s = origin_s + float(records.last_s.max())
        for name in views:
            if self._lost.get(name, inf) < end_s:
                raise ValueError(
                    f"{self.name}: worker {name} left before the last request finished; a twin "
                    "simulates no faults"
                )
        places = {known.request.request_id: str(row) for row, known in enumerate(done)}
        numbers = {name: f"w{number}" for number, name in enumerate(views)}
        requests = [_on_clock(known.request, origin_s) for known in done]
        records.arrival_s[:] = [request.arrival_s for request in requests]
        records.finished[:] = True
        workload = Workload(
            self.name,
            np.array([known.submitted_s - origin_s for known in done]),
            np.array([known.request.prompt_tokens for known in done], np.int64),
            np.array([known.output_tokens for known in done], np.int64),
            requests=requests,
        )
        return RecordedRun(
            tuple(views.values()),
            workload,
            records,
            tuple(places),
            len(self._requests) - len(done),
            tuple(_renamed(self._advice, places, numbers, origin_s)),
            tuple(self._costs.get(name) for name in views),
            tuple(self._steps[name] for name in views),
            self._clock.timing(list(self._placements_s(done))),
            origin_s,
        )

    def _placements_s(self, requests: Iterable[_Progress]) -> Iterable[float]:
        """Yields the time from the round that places a request to the mean arrival of its prompt,
        for each request with a prompt that was computed in one step."""
        arrivals_s = {id(steps): steps.arrivals_s() for steps in self._steps.values()}
        for known in requests:
            if known.prefill and known.placed_s < inf:
                steps, place = known.prefill
                if steps.timings[place].prefill_tokens >= known.request.prompt_tokens:
                    yield float(arrivals_s[id(steps)][place]) - known.placed_s

    def _records(self, requests: int, origin_s: float) -> Records:
        records = Records(requests)
        ends_s = {id(steps): steps.ends_s() - origin_s for steps in self._steps.values()}
        for steps, last, new, rows in self._tokens:
            mine_s = ends_s[id(steps)]
            records.on_tokens(rows, mine_s[np.maximum(0, np.arange(last - new, last))])
        return records


@dataclass(frozen=True)
class RecordedLog:
    """An event log: the policy and the limits that the scheduler ran with, and the run."""

    preset: Preset
    limits: SchedulerLimits
    run: RecordedRun


def read_run(path: Path) -> RecordedLog:
    """Reads an event log; a truncated last line is skipped. Raises ValueError that names the file.
    O(lines)."""
    try:
        head = read_head(path)
        reader = RunReader(str(path))
        for step in read(path):
            reader.observe(step)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
    return RecordedLog(head.preset, head.limits, reader.build())


def _on_clock(request: Request, origin_s: float) -> Request:
    """Returns the request as a new one, without a worker, delivered tokens or a deadline, which a
    twin does not simulate."""
    return replace(
        request,
        arrival_s=request.arrival_s - origin_s,
        delivered_tokens=0,
        worker_id="",
        deadline_s=inf,
        prefix_hashes=(),
    )


def _renamed(
    advice: Iterable[tuple[float, ev.Event]],
    places: dict[str, str],
    numbers: dict[str, str],
    origin_s: float,
) -> Iterable[tuple[float, ev.Event]]:
    """Yields the advice with places instead of ids, without that for other requests and workers."""
    for now, event in advice:
        at_s = max(0.0, now - origin_s)
        match event:
            case ev.Forecasted(forecasts=forecasts):
                known = tuple((places[name], each) for name, each in forecasts if name in places)
                if known:
                    yield at_s, ev.Forecasted(known)
            case ev.Costed(worker_id=worker_id, cost=cost):
                if worker_id in numbers:
                    yield at_s, ev.Costed(numbers[worker_id], cost)
            case _:
                yield at_s, event
