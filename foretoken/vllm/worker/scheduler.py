"""vLLM's scheduler in a worker: plans come from foretoken's scheduler, through VllmState."""

import time
from collections import deque

from vllm.v1.core.sched.async_scheduler import AsyncScheduler as VllmAsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from foretoken.vllm.engine_requests import EngineRequests, VllmInternals
from foretoken.vllm.schedulers import Scheduler
from foretoken.vllm.settings import VllmConfig
from foretoken.vllm.step_clock import StepClock
from services.costs import StepTiming

MAX_TIMINGS = 64  # since the last `pop_timings`, which follows each step


class StepObserver:
    """Times the steps, and gives access to the requests."""

    def __init__(self, scheduler: VllmInternals):
        self.requests = EngineRequests(scheduler)
        self._clock = StepClock(self.requests.view.kv_tokens)
        self._timings: deque[StepTiming] = deque(maxlen=MAX_TIMINGS)

    def pop_timings(self) -> list[StepTiming]:
        """Those of the steps that have ended since the last call."""
        timings = list(self._timings)
        self._timings.clear()
        return timings

    def arrived(self, request: Request) -> None:
        """Plans are about each request; it waits until one admits it."""
        self.requests.plan_for(request)

    def follow(self) -> None:
        """Plans are carried out between two steps."""

    def scheduled(self, output: SchedulerOutput) -> None:
        self.requests.note_ended(output.finished_req_ids)
        tokens = output.num_scheduled_tokens.values()
        self._clock.began(tokens, self.requests.usage, time.monotonic())

    def stepped(self) -> None:
        if timing := self._clock.ended(time.monotonic()):
            self._timings.append(timing)

    def stop(self) -> None:
        """Has no thread."""


class WorkerScheduler(Scheduler):
    """vLLM's scheduler, which runs the requests that are admitted in `observer.requests`."""

    observer: StepObserver

    def _make_follower(self, settings: VllmConfig) -> StepObserver:
        self.observer = StepObserver(self)
        return self.observer


class AsyncWorkerScheduler(WorkerScheduler, VllmAsyncScheduler):
    """The same where vLLM schedules a step while the one before it runs."""


WorkerScheduler.asynchronous = AsyncWorkerScheduler
