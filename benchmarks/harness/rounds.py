"""Scheduling rounds with a given number of running and waiting requests."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from prometheus_client import CollectorRegistry

from services.core import Completion, FinishReason, Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import Forecast
from services.policies import decide
from services.policies.memory import PolicyMemory
from services.policies.preset import choose
from services.runtime.codecs.attach import encode_plan
from services.scheduler.codec import encode_request_event
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.metrics import SchedulerMetrics
from services.scheduler.observe.story_recorder import StoryRecorder

GATEWAY = "gateway#1"
COST = CostModel(0.01, 1e-4, 2e-4, 1e-7, offload_token_s=1e-6, upload_token_s=1e-6)
MAX_TOKENS = 1_024
FINISHED = 4  # requests that end, and arrive, between two rounds
REPORT_STEPS = 16  # tokens per request between two reports

UNMEASURED = 5  # reports of each worker before the measured ones
STORIES = 4_096  # ended ones that are kept

# The parts of a round: the board frozen; ranked, and narrowed to candidates; arranged; and the
# decision carried out up to the plans.
PARTS = ("snapshot", "rank", "arrange", "apply")

Arrange = Callable[[SchedulerState, float], list[ev.Action]]


@dataclass
class RoundTimes:
    """CPU milliseconds of each round, of its parts, and of what follows it outside the state:
    stories, metrics and messages; and of all rounds after which no worker is due. CPU microseconds
    of each report, per request in it."""

    rounds_ms: list[float] = field(default_factory=list)
    passes_ms: list[float] = field(default_factory=list)
    parts_ms: list[tuple[float, ...]] = field(default_factory=list)
    publish_ms: list[float] = field(default_factory=list)
    report_us: list[float] = field(default_factory=list)


def arrange_in_process(state: SchedulerState, now: float) -> list[ev.Action]:
    """A round from the snapshot to the plans, arranged in this process."""
    return state.step(ev.Round(), now)


@contextmanager
def _splitting(marks: list[float]) -> Iterator[None]:
    """Appends the CPU time at which ranking begins, and arranging begins and ends."""

    def before(call: Callable[..., Any], after: bool = False) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            marks.append(time.process_time())
            result = call(*given)
            if after:
                marks.append(time.process_time())
            return result

        return timed

    rank, arrange = before(decide.rank_requests), before(decide.arrange, after=True)
    with patch.object(decide, "rank_requests", rank), patch.object(decide, "arrange", arrange):
        yield


class BusyScheduler:
    """A scheduler state with memory for the running requests only, divided over its workers.

    Every request has a separate forecast with 64 points. Between two rounds some requests end, as
    many arrive, and all others generate a report's tokens. With presets that divide the pool into
    batches all running requests end, and with `anew` all waiting ones are divided again. `reports`
    are the workers that report before each round, in turn; 0: all, before as many rounds as are
    due.
    """

    def __init__(
        self,
        policy: str,
        running: int,
        queued: int,
        apart: bool = False,
        anew: bool = True,
        workers: int = 1,
        reports: int = 0,
    ):
        self._rng = np.random.default_rng(0)
        self.state = SchedulerState(
            choose(policy), SchedulerLimits(max_queue=2 * queued + running), apart
        )
        self.now = 1_000.0
        self.makes_batches = self.state.preset.arrangement == "batch"
        self._anew = anew and self.makes_batches
        self._report_count = reports or workers
        self._stories = StoryRecorder(STORIES)
        self._metrics = SchedulerMetrics(CollectorRegistry())
        self._outputs: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        self._reports = self._count = 0
        slots = running // workers
        for number in range(workers):
            name = f"w{number}"
            view = WorkerView(name, name, "demo", slots * 640, 16, slots, 8_192)
            self._step(ev.WorkerAttached(_link(name), view))
            self._step(ev.Costed(name, COST))
        self._submit(running + queued)

    @property
    def running(self) -> int:
        return sum(len(worker.running) for worker in self.state.workers.values())

    def turn(self, arrange: Arrange, times: RoundTimes) -> None:
        """Applies reports, submits new requests, and arranges and times the rounds that are due."""
        self.now += 0.1
        self._reports += 1
        count, most = len(self.state.workers), self._report_count
        first, workers = self._reports * most % count, list(self.state.workers)
        ended = [
            self._report(worker, _share((nth + self._reports) % most, most), times)
            for nth, worker in enumerate((workers[first:] + workers[:first])[:most])
        ]
        self._submit(max(FINISHED, sum(ended)))
        if self._anew:
            self.state.rounds.memory = PolicyMemory()
        first = len(times.rounds_ms)
        self._round(arrange, times)
        while most == count and self.state.round_due_s <= self.now:
            self._round(arrange, times)
        times.passes_ms.append(sum(times.rounds_ms[first:]))

    def _round(self, arrange: Arrange, times: RoundTimes) -> None:
        marks = [time.process_time()]
        with _splitting(marks):
            arrange(self.state, self.now)
        marks.append(time.process_time())
        times.rounds_ms.append((marks[-1] - marks[0]) * 1e3)
        times.parts_ms.append(tuple((after - before) * 1e3 for before, after in pairwise(marks)))
        began_s = time.process_time()
        self.publish()
        times.publish_ms.append((time.process_time() - began_s) * 1e3)

    def _report(self, worker: str, share: int, times: RoundTimes) -> int:
        """Applies and times a worker's report, in which `share` requests end; returns how many
        have ended."""
        names = list(self.state.workers[worker].running)
        ending = len(names) if self.makes_batches else share
        ended, rest = names[:ending], names[ending:]
        for name in rest:
            self._outputs[name] = min(self._outputs[name] + REPORT_STEPS, MAX_TOKENS - 1)
        report = Report(
            self._reports,
            self.state.workers[worker].plan_seq,
            tuple(
                RequestProgress(n, self._outputs[n], self._context(n), self._blocks(n))
                for n in rest
            ),
            tuple(Completion(n, self._outputs[n], FinishReason.STOP) for n in ended),
        )
        began_s = time.process_time()
        self.state.step(ev.Reported(_link(worker), worker, report), self.now)
        report_s = time.process_time() - began_s
        times.report_us.append(report_s * 1e6 / max(1, len(names)))
        self.publish()
        return len(ended)

    def _step(self, event: ev.Event) -> None:
        self.state.step(event, self.now)
        self.publish()

    def publish(self) -> None:
        """What the service does with a step, short of sending."""
        step = self.state.last_step
        self._stories.observe(step, self.state)
        self._metrics.observe(step, self.state)
        for action in step.actions:
            match action:
                case ev.SendPlan():
                    encode_plan(action.plan)
                case ev.Place() | ev.Preempt() | ev.Resume() | ev.Finish():
                    encode_request_event(action)

    def _blocks(self, name: str) -> int:
        return -(-self._context(name) // 16)

    def _context(self, name: str) -> int:
        return self._prompts[name] + self._outputs[name]

    def _submit(self, count: int) -> None:
        for _ in range(count):
            self._count += 1
            name = f"r{self._count}"
            prompt = int(self._rng.integers(16, 512))
            request = Request(name, "demo", prompt, MAX_TOKENS, self.now)
            self._outputs[name], self._prompts[name] = 0, prompt
            self._step(ev.Submitted(GATEWAY, request))
            self._step(ev.Forecasted(((name, self._forecast()),)))

    def _forecast(self) -> Forecast:
        """Returns a random forecast of up to 64 points."""
        lengths = np.unique(np.clip(self._rng.lognormal(5, 0.9, 64), 1, MAX_TOKENS - 1))
        weight = 1 / len(lengths)
        return Forecast(tuple(lengths.tolist()), (weight,) * len(lengths), MAX_TOKENS, "bench")


def _share(place: int, workers: int) -> int:
    """How many of FINISHED requests end at a worker; all shares add up to FINISHED."""
    return FINISHED * (place + 1) // workers - FINISHED * place // workers


def _link(worker: str) -> str:
    return f"{worker}#1"


def measure(
    policy: str,
    running: int,
    queued: int,
    turns: int,
    anew: bool = True,
    workers: int = 1,
    reports: int = 0,
) -> tuple[BusyScheduler, RoundTimes]:
    """Measures `turns` of a BusyScheduler after some that fill the memory."""
    scheduler = BusyScheduler(policy, running, queued, anew=anew, workers=workers, reports=reports)
    times = RoundTimes()
    unmeasured = UNMEASURED * (workers // (reports or workers))
    for number in range(unmeasured + turns):
        scheduler.turn(arrange_in_process, RoundTimes() if number < unmeasured else times)
    return scheduler, times
