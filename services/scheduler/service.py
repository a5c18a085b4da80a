"""The scheduler's servicer: decode, step, carry out. It alone reads the clock."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from observability.tracing import NO_SPANS, Spans
from protos.generated import scheduler_pb2, scheduler_pb2_grpc
from services.core import FinishReason
from services.runtime.codecs.attach import (
    decode_drain_s,
    decode_held,
    decode_report,
    decode_worker_hello,
    encode_plan,
)
from services.runtime.codecs.common import decode_reason
from services.runtime.errors import Code, InvalidArgument, ServiceError
from services.runtime.streams import Outbox, duplex
from services.scheduler.codec import (
    decode_request,
    encode_fleet,
    encode_request_event,
    encode_story,
)
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.core.admission import Limits
from services.scheduler.core.state import SchedulerState
from services.scheduler.links.batcher import BatcherLink
from services.scheduler.links.peers import PeerChannels, PeerServices
from services.scheduler.observe.event_log import EventLog, Head, our_version
from services.scheduler.observe.lookup import find_stories
from services.scheduler.observe.metrics import SchedulerMetrics
from services.scheduler.observe.spans import SchedulerSpans
from services.scheduler.observe.story_recorder import StoryRecorder

log = logging.getLogger(__name__)

REPORT_S = 0.01  # a worker's next is about so far away
OUTCOMES_S = 1.0  # what the predictor gets to hear the last of them

GatewayEvents = ev.Place | ev.Preempt | ev.Resume | ev.SendForecast | ev.Finish | ev.Refuse


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Owns the state and every stream into it. `run` must be running for answers to come.

    Raises ValueError at construction for an unknown policy or choice.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        advisers: PeerChannels,
        registry: CollectorRegistry,
        batcher: aio.Channel | None = None,
        spans: Spans = NO_SPANS,
    ):
        """`batcher`: the way to a batcher of its own, where there is one."""
        preset = config.chosen()
        self.config = config
        self.state = SchedulerState(preset, limits_of(config), apart=batcher is not None)
        self.recorder: StoryRecorder | None = StoryRecorder(config.story_requests)
        self.metrics = SchedulerMetrics(registry)
        self.metrics.watch(self.state)
        self._spans = SchedulerSpans(spans)
        self._advice = PeerServices(config, advisers, self, self._spans.forecast_parent)
        self._arranger = batcher and BatcherLink(
            batcher,
            preset,
            self.state.ledger.board.forecasts,
            config.batcher_timeout_s,
            self.metrics,
            self.dispatch,
        )
        self._links = count(1)
        self._gateways: dict[str, Outbox[scheduler_pb2.SchedulerEvent]] = {}
        self._workers: dict[str, Outbox[scheduler_pb2.Plan]] = {}
        self._displaced: set[str] = set()
        self._retimed = asyncio.Event()
        self._due_s = inf  # when the next Tick is due, as the timekeeper has it
        self._round: asyncio.TimerHandle | None = None  # the next one, while one is wanted
        self._rest_until_s = 0.0  # so that rounds leave the loop its share
        self._told_fleet = ev.Fleet()
        self._over = False  # handed over
        self._log: EventLog | None = None
        self._perform: dict[str, Callable[[Any], None]] = {
            "ask_forecast": self._advice.ask_forecast,
            "ask_arrange": self._ask_arrange,
            "displace": self._displace,
            "learn": self._advice.learn,
            "timed": self._timed,
            "send_plan": self._send_plan,
            "place": self._tell_gateway,
            "preempt": self._tell_gateway,
            "resume": self._tell_gateway,
            "foretell": self._tell_gateway,
            "finish": self._tell_end,
            "refuse": self._tell_end,
        }

    async def run(self) -> None:
        """Keep deadlines and talk to the advisers, until cancelled."""
        with ExitStack() as stack:
            if self.config.event_log:
                self._log = stack.enter_context(self._open_log())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_time())
                tasks.create_task(self._keep_fleet_told())
                tasks.create_task(self._advice.run())
                if self._arranger:
                    tasks.create_task(self._arranger.run())

    def _open_log(self) -> EventLog:
        state = self.state
        head = Head(state.preset, state.limits, self._arranger is not None, our_version())
        return EventLog(Path(self.config.event_log), self.config.event_log_max_bytes, head)

    async def hand_over(self) -> None:
        """End at once, as if killed, but for what is still to be learnt: every stream ends, nobody
        is refused, cancelled or waited for. Gateways keep their requests and announce them to the
        next scheduler, workers go on inside their budgets and are adopted by it."""
        self._over = True
        for to_gateway in self._gateways.values():
            to_gateway.close()
        for to_worker in self._workers.values():
            to_worker.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTCOMES_S):
                await self._advice.told()

    async def wind_up(self) -> None:
        """The last answers have been given: return once their workers have said so, too, and the
        predictor was told, or can't be."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTCOMES_S):
                while self.state.jobs:  # noqa: ASYNC110 - it takes a report
                    await asyncio.sleep(REPORT_S)
                await self._advice.told()

    def dispatch(self, event: ev.Event) -> None:
        """One step of the state, and everything it asks for; nothing once it was handed over."""
        if self._over:
            return
        now = time.monotonic()
        actions = self.state.step(event, now)
        if self._log:
            self._log.append(now, event, actions)
        self._tell(event, now, actions)
        self._spans.tell(event, now, actions, self.state.jobs)
        self.metrics.stepped(event, now, actions, self.state)
        for action in actions:
            self._perform[action.kind](action)
        self._await_round(now)
        if self.state.next_deadline() < self._due_s:
            self._retimed.set()

    def _tell(self, event: ev.Event, now: float, actions: Sequence[ev.Action]) -> None:
        """For `foretoken why`. A mistake in the telling ends that, not the serving."""
        if self.recorder is None:
            return
        try:
            self.recorder.tell(event, now, actions, self.state)
        except Exception:
            log.exception("no stories of requests are told any more")
            self.recorder = None

    def _await_round(self, now: float) -> None:
        """Start a round once the loop has taken in what lies there already."""
        due_s = self.state.round_due_s
        if self._round is None and due_s < inf:
            delay_s = max(0.0, due_s - now, self._rest_until_s - now)
            self._round = asyncio.get_running_loop().call_later(delay_s, self._start_round)

    def _start_round(self) -> None:
        self._round = None
        started_s = time.thread_time()  # not what others on this core took meanwhile
        self.dispatch(ev.Round())
        took_s = time.thread_time() - started_s
        self.metrics.round_seconds.observe(took_s)
        share = self.config.round_share
        self._rest_until_s = time.monotonic() + took_s * (1 / share - 1)

    def _ask_arrange(self, action: ev.AskArrange) -> None:
        if self._arranger and self.state.rounds.contest:
            self._arranger.ask(self.state.rounds.contest)

    def _displace(self, action: ev.Displace) -> None:
        """Its stream ends with the reason; the worker that comes after it stays."""
        if outbox := self._workers.get(action.link):
            self._displaced.add(action.link)
            outbox.close()

    async def _keep_fleet_told(self) -> None:
        """Gateways refuse at the door by the queue's length and drain time: what they know of
        these is never much older than an interval."""
        while True:
            await asyncio.sleep(self.config.fleet_interval_s)
            fleet, told = self.state.fleet(), self._told_fleet
            if _noticeable(fleet.queued, told.queued) or _noticeable(fleet.drain_s, told.drain_s):
                self._tell_fleet()

    async def _keep_time(self) -> None:
        while not self._over:
            self._retimed.clear()
            self._due_s = self.state.next_deadline()
            wait_s = self._due_s - time.monotonic()
            try:
                async with asyncio.timeout(wait_s if wait_s < 3600 else None):
                    await self._retimed.wait()
            except TimeoutError:
                self.dispatch(ev.Tick())

    def _send_plan(self, action: ev.SendPlan) -> None:
        if outbox := self._workers.get(action.link):
            outbox.put(encode_plan(action.plan))

    def _timed(self, action: ev.Timed) -> None:
        self._advice.observe_batch(action.worker_id, action.timing)

    def _tell_gateway(self, action: GatewayEvents) -> None:
        if outbox := self._gateways.get(action.link):
            outbox.put(encode_request_event(action))

    def _tell_end(self, action: ev.Finish | ev.Refuse) -> None:
        self._tell_gateway(action)
        self._forget(action.request_id)

    def _forget(self, request_id: str) -> None:
        """Nothing of a request that is here no more is kept for its forecast; one refused for its
        name leaves the text of the one that has it."""
        if request_id not in self.state.jobs:
            self._advice.drop_text(request_id)

    def _tell_fleet(self) -> None:
        self._told_fleet = self.state.fleet()
        fleet = scheduler_pb2.SchedulerEvent(fleet=encode_fleet(self._told_fleet))
        for outbox in self._gateways.values():
            outbox.put(fleet)

    # RPCs

    async def GetFleet(
        self, request: scheduler_pb2.GetFleetRequest, context: Any
    ) -> scheduler_pb2.FleetView:
        return encode_fleet(self.state.fleet())

    async def Why(
        self, request: scheduler_pb2.WhyRequest, context: Any
    ) -> scheduler_pb2.WhyResponse:
        if self.recorder is None:
            raise ServiceError(Code.UNAVAILABLE, "no stories are told any more; the log says why")
        stories = find_stories(request.request_id, self.recorder, self.state)
        return scheduler_pb2.WhyResponse(stories=[encode_story(story) for story in stories])

    async def Submit(
        self, requests: AsyncIterator[scheduler_pb2.SubmitMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.SchedulerEvent]:
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("hello", "the first message of Submit must be a hello")
        self._require_here()
        link = f"{first.hello.gateway_id}#{next(self._links)}"
        outbox: Outbox[scheduler_pb2.SchedulerEvent] = Outbox(self.config.outbox_limit)
        self._gateways[link] = outbox
        outbox.put(scheduler_pb2.SchedulerEvent(fleet=encode_fleet(self.state.fleet())))
        try:
            async for message in duplex(self._read_gateway(link, requests), outbox):
                yield message
        finally:
            del self._gateways[link]
            self.dispatch(ev.GatewayLost(link))

    async def _read_gateway(
        self, link: str, requests: AsyncIterator[scheduler_pb2.SubmitMessage]
    ) -> None:
        async for message in requests:
            if message.HasField("request"):
                self._submit(link, message.request)
            elif message.HasField("cancel"):
                cancel = message.cancel
                reason = decode_reason(cancel.reason) or FinishReason.CANCELLED
                self.dispatch(ev.Cancelled(link, cancel.request_id, reason, cancel.output_tokens))
                self._forget(cancel.request_id)

    def _submit(self, link: str, message: scheduler_pb2.NewRequest) -> None:
        now = time.monotonic()
        request = decode_request(message, now)
        self._spans.submitted(request.request_id, message.traceparent, now)
        self._advice.keep_text(request.request_id, message.text)
        self.dispatch(ev.Submitted(link, request))

    async def Attach(
        self, requests: AsyncIterator[scheduler_pb2.WorkerMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.Plan]:
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("hello", "the first message of Attach must be a hello")
        self._require_here()
        view = decode_worker_hello(first.hello)
        link = f"{view.worker_id}#{next(self._links)}"
        outbox: Outbox[scheduler_pb2.Plan] = Outbox(self.config.outbox_limit)
        self._workers[link] = outbox
        self._advice.unwatch(view.worker_id)
        self.dispatch(ev.WorkerAttached(link, view, decode_held(first.hello)))
        self._advice.observe(view.worker_id, first.hello.profile, first.hello.swaps)
        self._tell_fleet()
        log.info("worker %s attached: %s, %d KV tokens", view.worker_id, view.model, view.kv_tokens)
        try:
            reader = self._read_worker(link, view.worker_id, requests)
            async for plan in duplex(reader, outbox):
                yield plan
            if link in self._displaced:
                raise ServiceError(
                    Code.ALREADY_EXISTS, f"another worker attached as {view.worker_id}"
                )
        finally:
            del self._workers[link]
            self._displaced.discard(link)
            self.dispatch(ev.WorkerLost(link, view.worker_id))
            if view.worker_id not in self.state.workers:
                self._advice.unwatch(view.worker_id)
            self._tell_fleet()
            log.info("worker %s left", view.worker_id)

    def _require_here(self) -> None:
        if self._over:
            raise ServiceError(Code.UNAVAILABLE, "this scheduler is leaving; another follows")

    async def _read_worker(
        self, link: str, worker_id: str, requests: AsyncIterator[scheduler_pb2.WorkerMessage]
    ) -> None:
        async for message in requests:
            if message.HasField("report"):
                report = message.report
                self.dispatch(ev.Reported(link, worker_id, decode_report(report)))
                self._advice.observe(worker_id, report.timings, report.swaps)
            elif message.HasField("draining"):
                drain_s = decode_drain_s(message.draining)
                self.dispatch(ev.WorkerDraining(link, worker_id, drain_s))
                log.info("worker %s is leaving", worker_id)


def limits_of(config: SchedulerConfig) -> Limits:
    return Limits(
        config.max_queue, config.adopt_s, config.forecast_patience_s, config.tenant_weights
    )


def _noticeable(value: float, told: float) -> bool:
    """A tenth more or less, or any, or none any more."""
    return abs(value - told) > 0.1 * max(value, told)
