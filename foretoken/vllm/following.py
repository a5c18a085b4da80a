"""Carries plans out inside vLLM's scheduler: the only module that touches vLLM's internals.

While a step runs, a thread decides what the next one may change:

    vLLM's requests ─progress─▶ Planner ─plan─▶ admitted requests, preemptions, order of `running`

vLLM never waits for a round, except when it has nothing to run. Until a plan is there it continues
with the last one; a request that arrives while none waits and memory has room starts at once.

What a plan cannot have from vLLM: a request that does not run keeps no KV, because vLLM frees its
blocks (its prefix cache may still find them), and a request that has used up its slice runs until
the next round.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import Request, RequestStatus

from foretoken.vllm.forecasters import choose_forecaster
from foretoken.vllm.learner import Learner
from foretoken.vllm.lengths import Asked
from foretoken.vllm.planned_queue import PlannedQueue
from foretoken.vllm.planner import Planner
from foretoken.vllm.request_reader import RequestReader
from foretoken.vllm.round_rest import RoundRest
from foretoken.vllm.settings import VllmConfig
from foretoken.vllm.step_clock import StepClock
from services.core import Completion, FinishReason, Plan, RequestProgress, WorkerView
from services.core import Request as CoreRequest

log = init_logger(f"vllm.{__name__}")

QUEUES = ("waiting", "skipped_waiting")  # of requests without KV; vLLM 0.30 has the second one
REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_REPETITION: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH_CAPPED: FinishReason.LENGTH,
}
LIVE_S = 1.0  # between two looks of the learner at answers that have not ended


class VllmInternals(Protocol):
    """What is used of vLLM's scheduler beyond its interface. `running` is in order of admission;
    vLLM preempts its last request when memory runs out."""

    vllm_config: Any
    kv_cache_config: Any
    kv_cache_manager: Any
    block_size: int
    max_num_running_reqs: int
    max_num_scheduled_tokens: int
    max_model_len: int
    running: list[Request]
    requests: dict[str, Request]
    policy: SchedulingPolicy
    requires_kv_delivery: bool
    pause_state: PauseState

    def _preempt_request(
        self, request: Request, timestamp: float, drop_stale_output: bool = ...
    ) -> None: ...

    def _request_blocks_can_be_freed(self, request: Request) -> bool: ...


class PlanFollower:
    """One for each scheduler of vLLM. The planner belongs to the thread while a round runs, and to
    vLLM's loop between two rounds."""

    def __init__(self, scheduler: VllmInternals, settings: VllmConfig):
        self._scheduler = scheduler
        preset = settings.chosen()
        self._view = view = describe_engine(scheduler)
        self.planner = Planner(preset, view, settings.tenant_weights, time.monotonic())
        self._reader = RequestReader(
            view,
            settings.classes(),
            settings.default_sla,
            scheduler.policy is SchedulingPolicy.PRIORITY,
        )
        forecaster = choose_forecaster(preset, settings, scheduler.vllm_config.model_config)
        self._learner = Learner(forecaster.lengths)
        self._clock = StepClock(view.kv_tokens)
        self._thread = ThreadPoolExecutor(1, "foretoken-rounds")
        self._round: Future[Plan] | None = None
        self._rest = RoundRest(settings.round_share)
        self._arrivals: list[CoreRequest] = []  # not submitted to the planner yet
        self._live: dict[str, Request] = {}  # requests that plans are about
        self._others = 0  # live requests that they are not about
        self._dropped: list[RequestProgress] = []  # preempted by the last plan
        self._live_due_s = 0.0
        self._gave_up = False
        self._queues = [self._replace_queue(name) for name in QUEUES if name in scheduler.__dict__]
        scheduler.policy = SchedulingPolicy.FCFS  # it then preempts the last of `running`
        self._learner.start()
        log.info(
            "foretoken schedules by the policy %s, with forecasts by %s",
            preset.name,
            forecaster.name,
        )

    def _replace_queue(self, name: str) -> PlannedQueue[Request]:
        queue = PlannedQueue[Request](self._is_planned)
        setattr(self._scheduler, name, queue)
        return queue

    def _is_planned(self, request: Request) -> bool:
        return self._live.get(request.request_id) is request

    # What happens in vLLM

    def arrived(self, request: Request) -> None:
        """Before vLLM queues it. Plans exclude pooling requests, sessions with a growing prompt,
        and requests that memory cannot hold to their end: vLLM admits these in order of
        arrival."""
        if request.request_id in self._scheduler.requests:
            return  # further input of a session
        with self._guard():
            known = self._gave_up or request.request_id in self._live  # its last use is not counted
            read = None if known else self._reader.read(request, time.monotonic())
            if read:
                self._live[request.request_id] = request
                self._arrivals.append(read)
                self._learner.ask(Asked(read, request.prompt_token_ids or ()))
            else:
                self._others += 1

    def follow(self) -> None:
        """Before a step: carries out the plan of the last round, if it has ended."""
        if self._gave_up or (self._round and self._scheduler.running and not self._round.done()):
            return
        now = time.monotonic()
        with self._guard():
            if self._round:
                plan, self._round = self._round.result(), None
                self._carry_out(plan, now)
            if self._arrivals:
                self._submit(now)
            if not self._scheduler.running and not any(self._queues):
                self._plan_for_idle_engine(now)

    def _plan_for_idle_engine(self, now: float) -> None:
        """Nothing runs and nothing is admitted: the loop may wait for a round."""
        if not (self.planner.waiting or self._has_preempted()):
            return
        self._carry_out(self._planning(now)(), now)
        if not any(self._queues) and self.planner.waiting:
            raise RuntimeError("the plan admits nothing although nothing runs")

    def _has_preempted(self) -> bool:
        return any(queue.preempted for queue in self._queues)

    def scheduled(self, output: SchedulerOutput) -> None:
        """After vLLM has composed a step: begins a round, which may last as long as the step."""
        now = time.monotonic()
        with self._guard():
            usage = self._scheduler.kv_cache_manager.usage
            self._clock.began(output.num_scheduled_tokens.values(), usage, now)
            if self._round or self._gave_up or not self._rest.is_over(now):
                return
            ended = len(self._live) + self._others != len(self._scheduler.requests)
            if self.planner.is_due(now, ended or self._has_preempted()):
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
            self._live.clear()
            for queue in self._queues:
                queue.admit([request.request_id for request in queue])

    def stop(self) -> None:
        self._thread.shutdown()
        self._learner.stop()

    # Rounds

    def _submit(self, now: float) -> None:
        arrivals, self._arrivals = self._arrivals, []
        for request in arrivals:
            if not self.planner.submit(request, now):  # refused, which vLLM cannot do any more
                self._live.pop(request.request_id, None)
                self._others += 1
                self._admit([request.request_id])
        self._admit(self.planner.admit_at_once([r.request_id for r in arrivals], now))

    def _planning(self, now: float) -> Callable[[], Plan]:
        """Gathers what has happened since the last round, and returns the round. O(running), and
        O(live) if requests have ended."""
        finished, cut_short = self._pop_ended()
        preempted = [name for queue in self._queues for name in queue.pop_preempted()]
        progress = [self._progress(r) for r in self._scheduler.running if self._is_planned(r)]
        blocks = self._view.kv_tokens // self._view.block_tokens
        used = round(self._scheduler.kv_cache_manager.usage * blocks)
        shared = max(0, sum(each.blocks for each in progress) - used)
        gone = [_without_kv(self._live[name]) for name in preempted if name in self._live]
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
            plan = planner.plan(moved, finished, cut_short, gone, blocks - used, shared, now)
            self._learner.learn(planner.pop_outcomes())
            if sees_live:
                self._learner.observe_live(planner.live_answers())
            return plan

        return plan

    def _pop_ended(self) -> tuple[list[Completion], list[Completion]]:
        """The requests that have ended since the last call: with an answer, or cut short. A KV
        connector may still have their blocks."""
        ended = [r for r in self._live.values() if r.status > RequestStatus.PREEMPTED]
        finished, cut_short = [], []
        for request in ended:
            name = request.request_id
            del self._live[name]
            if reason := REASONS.get(request.status):
                finished.append(Completion(name, request.num_output_tokens, reason))
            else:
                output = request.num_output_tokens
                cut_short.append(Completion(name, output, FinishReason.CANCELLED))
        self._others = len(self._scheduler.requests) - len(self._live)
        return finished, cut_short

    def _progress(self, request: Request) -> RequestProgress:
        held = request.num_computed_tokens
        blocks = -(-held // self._view.block_tokens)
        return RequestProgress(request.request_id, request.num_output_tokens, held, blocks)

    def _carry_out(self, plan: Plan, now: float) -> None:
        self._pause([pause.request_id for pause in plan.pause], now)
        self._admit([grant.request_id for grant in plan.admit])
        if plan.victims:
            # Prefills come last, because decodes take the tokens of a step first.
            order = {name: number for number, name in enumerate(plan.victims)}
            self._scheduler.running.sort(
                key=lambda r: (r.is_prefill_chunk, -order.get(r.request_id, len(order)))
            )

    def _admit(self, names: Sequence[str]) -> None:
        for queue in self._queues:
            queue.admit(names)

    def _pause(self, names: Sequence[str], now: float) -> None:
        """Preempts those that run, and hides those that vLLM has not admitted yet. Not while vLLM
        is paused: it would not resume them."""
        if not names or self._scheduler.pause_state is not PauseState.UNPAUSED:
            return
        for queue in self._queues:
            queue.hold(names)
        paused, scheduler = set(names), self._scheduler
        stopping = [
            request
            for request in scheduler.running
            if request.request_id in paused and scheduler._request_blocks_can_be_freed(request)
        ]
        stopped = {request.request_id for request in stopping}
        scheduler.running = [r for r in scheduler.running if r.request_id not in stopped]
        drops = scheduler.requires_kv_delivery
        for request in stopping:
            scheduler._preempt_request(request, now, drop_stale_output=drops)
        for queue in self._queues:
            queue.forget_preempted(stopped)
        self._dropped = [_without_kv(request) for request in stopping]


def _without_kv(request: Request) -> RequestProgress:
    return RequestProgress(request.request_id, request.num_output_tokens, 0, 0)


def describe_engine(scheduler: VllmInternals) -> WorkerView:
    """vLLM's engine as a worker. A block belongs to one group of layers; models with several
    groups, such as those with sliding windows, need one in each."""
    config, cache = scheduler.vllm_config, scheduler.kv_cache_config
    groups = max(1, len(cache.kv_cache_groups))
    blocks = (cache.num_blocks - 1) // groups  # vLLM keeps one block empty
    return WorkerView(
        "vllm",
        "",
        config.model_config.served_model_name or config.model_config.model,
        blocks * scheduler.block_size,
        scheduler.block_size,
        # vLLM 0.32 has slots for requests that it does not run.
        getattr(scheduler, "max_num_active_reqs", scheduler.max_num_running_reqs),
        scheduler.max_model_len,
        max_batch_tokens=scheduler.max_num_scheduled_tokens,
    )
