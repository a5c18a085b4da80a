"""Plans inside vLLM's scheduler, made in this process and carried out between steps.

While a step runs, a thread decides what the next one may change:

    vLLM's requests ─progress─▶ Planner ─plan─▶ admitted requests, preemptions, order of `running`

vLLM never waits for a round, except when it has nothing to run. Until a plan is there it continues
with the last one; a request that arrives while none waits and memory has room starts at once.

What a plan cannot have from vLLM: a request that has used up its slice runs until the next round.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry
from vllm.logger import init_logger
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from foretoken.vllm.engine_requests import EngineRequests, VllmInternals
from foretoken.vllm.forecasters import choose_forecaster
from foretoken.vllm.learner import Learner
from foretoken.vllm.lengths import Asked
from foretoken.vllm.metrics.server import MetricsServer
from foretoken.vllm.planner import Planner
from foretoken.vllm.request_reader import RequestReader
from foretoken.vllm.round_rest import RoundRest
from foretoken.vllm.settings import VllmConfig
from foretoken.vllm.step_clock import StepClock
from observability.metrics import scheduler as catalogue
from observability.metrics.instruments import Instruments
from services.core import Completion, FinishReason, Plan, RequestProgress
from services.core import Request as CoreRequest
from services.runtime.config import ConfigError
from services.scheduler.observe.metrics import SchedulerMetrics

log = init_logger(f"vllm.{__name__}")

REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_REPETITION: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
}
LIVE_S = 1.0  # between two looks of the learner at answers that have not ended


class PlanFollower:
    """One for each scheduler of vLLM. The planner belongs to the thread while a round runs, and to
    vLLM's loop between two rounds."""

    def __init__(self, scheduler: VllmInternals, settings: VllmConfig):
        preset = settings.chosen()
        by_priority = scheduler.policy is SchedulingPolicy.PRIORITY  # until the next line
        self._requests = EngineRequests(scheduler)
        view, config = self._requests.view, scheduler.vllm_config
        registry = CollectorRegistry()
        metrics = SchedulerMetrics(registry)
        self.planner = Planner(
            preset, view, settings.tenant_weights, time.monotonic(), metrics.observe
        )
        metrics.watch(self.planner.state)
        Instruments(registry).reading(catalogue.LEADS, lambda: not self._gave_up)
        self._reader = RequestReader(view, settings.classes(), settings.default_sla, by_priority)
        forecaster = choose_forecaster(preset, settings, config.model_config, metrics, registry)
        self._learner = Learner(forecaster.lengths)
        self._clock = StepClock(view.kv_tokens)
        self._thread = ThreadPoolExecutor(1, "foretoken-rounds")
        self._round: Future[Plan] | None = None
        self._rest = RoundRest(settings.round_share, metrics.round_seconds.observe)
        self._arrivals: list[CoreRequest] = []  # not submitted to the planner yet
        self._dropped: list[RequestProgress] = []  # preempted by the last plan
        self._live_due_s = 0.0
        self._gave_up = False
        self._server = serve_metrics(settings, config.parallel_config, registry)
        self._learner.start()
        log.info(
            "foretoken schedules by the policy %s, with forecasts by %s, as %s",
            preset.name,
            forecaster.name,
            type(scheduler).__name__,
        )

    # What happens in vLLM

    def arrived(self, request: Request) -> None:
        """Before vLLM queues it. Plans exclude pooling requests, sessions with a growing prompt,
        and requests that memory cannot hold to their end: vLLM admits these in order of
        arrival."""
        if request.request_id in self._requests:
            return  # further input of a session
        with self._guard():
            # An id that is still planned ended as the request of before and is not counted yet.
            known = self._gave_up or request.request_id in self._requests.planned
            read = None if known else self._reader.read(request, time.monotonic())
            if read:
                self._requests.plan_for(request)
                self._arrivals.append(read)
                self._learner.ask(Asked(read, request.prompt_token_ids or ()))

    def follow(self) -> None:
        """Before a step: carries out the plan of the last round, if it has ended."""
        if self._gave_up or (self._round and self._requests.runs and not self._round.done()):
            return
        now = time.monotonic()
        with self._guard():
            if self._round:
                plan, self._round = self._round.result(), None
                self._carry_out(plan, now)
            if self._arrivals:
                self._submit(now)
            if not (self._requests.runs or self._requests.admits):
                self._plan_for_idle_engine(now)

    def _plan_for_idle_engine(self, now: float) -> None:
        """Nothing runs and nothing is admitted: the loop may wait for a round."""
        if not (self.planner.waiting or self._requests.has_preempted):
            return
        self._carry_out(self._planning(now)(), now)
        if not self._requests.admits and self.planner.waiting:
            raise RuntimeError("the plan admits nothing although nothing runs")

    def scheduled(self, output: SchedulerOutput) -> None:
        """After vLLM has composed a step: begins a round, which may last as long as the step."""
        now = time.monotonic()
        with self._guard():
            requests = self._requests
            requests.note_ended(output.finished_req_ids)
            self._clock.began(output.num_scheduled_tokens.values(), requests.usage, now)
            if self._round or self._gave_up or not self._rest.is_over(now):
                return
            if self.planner.is_due(now, requests.has_ended or requests.has_preempted):
                self._round = self._thread.submit(self._rest.timed, self._planning(now))

    def stepped(self) -> None:
        """After a step."""
        with self._guard():
            if timing := self._clock.ended(time.monotonic()):
                self._learner.timed(timing)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """After a defect here, vLLM continues by itself: it must not end the server."""
        try:
            yield
        except Exception:
            log.exception("foretoken's scheduler failed; vLLM serves by arrival from now on")
            self._gave_up = True
            self._round = None
            self._arrivals.clear()
            self._requests.give_up()

    def stop(self) -> None:
        self._thread.shutdown()
        self._learner.stop()
        if self._server:
            self._server.stop()

    # Rounds

    def _submit(self, now: float) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for request in arrivals:
            if not self.planner.submit(request, now):  # refused, which vLLM cannot do any more
                self._requests.leave(request.request_id)
        self._requests.admit(self.planner.admit_at_once([r.request_id for r in arrivals], now))

    def _planning(self, now: float) -> Callable[[], Plan]:
        """Gathers what has happened since the last round, and returns the round.
        O(running)."""
        finished, cut_short = self._pop_ended()
        gone = self._requests.pop_preempted()
        progress = self._requests.progress()
        free, shared = self._requests.memory(progress)
        moved, self._dropped = [*self._dropped, *progress], []
        news, cost = self._learner.pop_news(), self._learner.pop_cost()
        sees_live = now >= self._live_due_s
        if sees_live:
            self._live_due_s = now + LIVE_S

        def plan() -> Plan:
            planner = self.planner
            planner.learned(news, now)
            if cost:
                planner.cost_measured(cost, now)
            plan = planner.plan(moved, finished, cut_short, gone, free, shared, now)
            self._learner.learn(planner.pop_outcomes())
            self._learner.forget(each.request_id for each in cut_short)
            if sees_live:
                self._learner.observe_live(planner.live_answers())
            return plan

        return plan

    def _pop_ended(self) -> tuple[list[Completion], list[Completion]]:
        """The requests that have ended since the last call: with an answer, or cut short."""
        finished, cut_short = [], []
        for request in self._requests.pop_ended():
            name = request.request_id
            if reason := REASONS.get(request.status):
                finished.append(Completion(name, request.num_output_tokens, reason))
            else:
                output = request.num_output_tokens
                cut_short.append(Completion(name, output, FinishReason.CANCELLED))
        return finished, cut_short

    def _carry_out(self, plan: Plan, now: float) -> None:
        self._dropped = self._requests.pause([pause.request_id for pause in plan.pause], now)
        self._requests.admit([grant.request_id for grant in plan.admit])
        self._requests.set_victims(plan.victims)


def serve_metrics(
    settings: VllmConfig, parallel: Any, registry: CollectorRegistry
) -> MetricsServer | None:
    """The metrics on the port of the settings, of the next engines with data parallelism on the
    next ports; None without one. Raises ConfigError for a port in use."""
    if not settings.metrics_port:
        return None
    port = settings.metrics_port + parallel.data_parallel_index
    try:
        return MetricsServer(settings.metrics_host, port, registry)
    except ConfigError as error:
        raise ConfigError(f"{error}; set FORETOKEN_VLLM_METRICS_PORT to a free port") from None
