"""The scheduler's servicer: decodes messages, steps the state, performs its actions. It is the only
reader of the clock."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from grpc import aio
from prometheus_client import CollectorRegistry

from observability.tracing import NO_SPANS, Spans
from protos.generated import scheduler_pb2, scheduler_pb2_grpc
from services.core import FinishReason
from services.runtime.border import check_name
from services.runtime.codecs.attach import encode_plan
from services.runtime.codecs.common import decode_reason
from services.runtime.errors import Code, ServiceError, UnrecoverableError
from services.runtime.network.identity import names_of
from services.runtime.network.peer_limits import PeerLimits
from services.runtime.network.streams import Outbox, duplex
from services.scheduler.codec import (
    decode_request,
    encode_fleet,
    encode_request_event,
    encode_story,
)
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.jobs import Fleet
from services.scheduler.core.populations import live_answers, shared_representatives
from services.scheduler.core.state import SchedulerState
from services.scheduler.leadership.keeper import SOLE, Leadership
from services.scheduler.links.adapters import AdapterRegistry
from services.scheduler.links.announced import check_announced
from services.scheduler.links.batcher import BatcherLink
from services.scheduler.links.border import check_cancel, check_hello, check_request
from services.scheduler.links.peers import PeerChannels, PeerServices
from services.scheduler.links.quarantine import Quarantine
from services.scheduler.links.worker_reader import WorkerReader
from services.scheduler.observe.event_log import EventLog, Head, our_version
from services.scheduler.observe.lookup import find_stories
from services.scheduler.observe.metrics import SchedulerMetrics
from services.scheduler.observe.spans import SchedulerSpans
from services.scheduler.observe.story_recorder import StoryRecorder

log = logging.getLogger(__name__)

REPORT_S = 0.01  # about the time between two reports of a worker
OUTCOMES_S = 1.0  # bound on delivering the last outcomes to the predictor


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Owns the state and every stream into it. `run` must run for answers to arrive.

    Raises ValueError at construction for an unknown policy or choice.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        channels: PeerChannels,
        registry: CollectorRegistry,
        batcher: aio.Channel | None = None,
        spans: Spans = NO_SPANS,
        leadership: Leadership = SOLE,
    ):
        """`batcher` is the channel to a batcher process, if there is one."""
        preset = config.chosen()
        self.config = config
        self.state = SchedulerState(preset, scheduler_limits(config), apart=batcher is not None)
        self.recorder: StoryRecorder | None = StoryRecorder(config.story_requests)
        self.metrics = SchedulerMetrics(registry)
        self.metrics.watch(self.state)
        self.metrics.watch_leadership(leadership)
        self._leadership = leadership
        self._spans = SchedulerSpans(spans)
        self._peers = PeerServices(
            config,
            channels,
            self.metrics,
            self.dispatch,
            partial(shared_representatives, self.state.ledger),
            partial(live_answers, self.state.ledger),
            self._spans.forecast_parent,
        )
        self._batcher = batcher and BatcherLink(
            batcher,
            preset,
            self.state.ledger.board.forecasts,
            config.batcher_timeout_s,
            self.metrics,
            self.dispatch,
        )
        most = {"gateway": config.max_gateways, "worker": config.max_workers}
        self._limits = PeerLimits(config.section, most, config.hello_wait_s)
        self._quarantine = Quarantine(self.metrics, self._end_streams)
        self._links = count(1)
        self._gateways: dict[str, Outbox[scheduler_pb2.SchedulerEvent]] = {}
        self._workers: dict[str, Outbox[scheduler_pb2.Plan]] = {}
        self._displaced: set[str] = set()
        self._retimed = asyncio.Event()
        self._due_s = inf  # time of the next Tick
        self._round: asyncio.TimerHandle | None = None  # the scheduled round
        self._rest_until_s = 0.0  # rounds leave the event loop its share of time
        self._round_s = 0.0  # of the last round
        self._sent_fleet = Fleet()
        self._sent_warnings: tuple[str, ...] = ()
        self._over = False  # handed over
        self._adapters = AdapterRegistry(config.adapter_wait_s, self._send_fleet)
        workers = self.state.workers
        self._reader = WorkerReader(
            workers, self._adapters, self._peers.cost_models, self.dispatch, self._send_fleet
        )
        self._log: EventLog | None = None

    async def run(self) -> None:
        """Keeps deadlines and talks to peers until cancelled."""
        with ExitStack() as stack:
            if self.config.event_log:
                self._log = stack.enter_context(self._open_log())
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._lead())
                tasks.create_task(self._quarantine.watch())
                tasks.create_task(self._keep_time())
                tasks.create_task(self._keep_fleet_current())
                tasks.create_task(self._peers.run())
                if self._batcher:
                    tasks.create_task(self._batcher.run())

    async def _lead(self) -> None:
        try:
            await self._leadership.run()
        except UnrecoverableError:
            self._end_streams()
            raise

    def _open_log(self) -> EventLog:
        state = self.state
        head = Head(state.preset, state.limits, self._batcher is not None, our_version())
        return EventLog(Path(self.config.event_log), self.config.event_log_max_bytes, head)

    async def hand_over(self) -> None:
        """Ends every stream at once, without refusing or cancelling requests, and delivers the last
        outcomes. Gateways keep their requests and submit them to the next scheduler; workers go on
        within their budgets and are adopted by it."""
        self._end_streams()
        await self._leadership.release()
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTCOMES_S):
                await self._peers.outcomes.wait_delivered()

    def _end_streams(self) -> None:
        self._over = True
        for to_gateway in self._gateways.values():
            to_gateway.close()
        for to_worker in self._workers.values():
            to_worker.close()

    async def wind_up(self) -> None:
        """After the last answers: waits until workers have reported them and the predictor has
        their outcomes, for OUTCOMES_S at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(OUTCOMES_S):
                while self.state.jobs:  # noqa: ASYNC110 - reports end them
                    await asyncio.sleep(REPORT_S)
                await self._peers.outcomes.wait_delivered()

    def dispatch(self, event: ev.Event) -> None:
        """Steps the state and performs its actions. Does nothing after the hand-over, and when
        another scheduler may lead."""
        now = time.monotonic()
        if self._over or now >= self._leadership.until_s:
            return
        with self._quarantine.around_step():
            step = self.state.try_step(event, now)
        if self._log:
            self._log.append(step)
        self._record_stories(step)
        self._spans.observe(step)
        self.metrics.observe(step, self.state)
        for action in step.actions:
            self._perform(action)
        self._peers.forget_ended(step, self.state.jobs)
        self._schedule_round(now)
        if self.state.next_deadline() < self._due_s:
            self._retimed.set()
        self._quarantine.check(step)

    def _record_stories(self, step: ev.Step) -> None:
        """For `foretoken why`. A defect there ends the stories, not the serving."""
        if self.recorder is None:
            return
        try:
            self.recorder.observe(step, self.state)
        except Exception:
            log.exception("recording stories failed; `foretoken why` has no answers until restart")
            self.recorder = None

    def _perform(self, action: ev.Action) -> None:  # noqa: C901 - a case per action
        match action:
            case ev.SendPlan():
                if to_worker := self._workers.get(action.link):
                    to_worker.put(encode_plan(action.plan))
            case (
                ev.Place() | ev.Preempt() | ev.Resume() | ev.SendForecast() | ev.SendLengthBound()
                | ev.Finish() | ev.Refuse()
            ):  # fmt: skip
                self._send_to_gateway(action)
            case ev.AskForecast():
                self._peers.forecasts.ask(action.requests)
            case ev.AskArrange():
                if self._batcher and self.state.rounds.candidates:
                    self._batcher.ask(self.state.rounds.candidates)
            case ev.Learn():
                self._peers.learn(action.outcome)
            case ev.Timed():
                self._peers.cost_models.observe_batch(action.worker_id, action.timing)
            case ev.Suspect():
                says = "is silent: it is suspected to hang" if action.suspected else "is back"
                log.warning("worker %s %s", action.worker_id, says)
            case ev.Displace():
                if to_worker := self._workers.get(action.link):
                    log.warning("worker %s is displaced: another attached as it", action.worker_id)
                    self._displaced.add(action.link)  # its stream ends with the reason
                    to_worker.close()

    def _schedule_round(self, now: float) -> None:
        """Starts a round once the loop has processed the events that are there already."""
        due_s = self.state.round_due_s
        if self._round is None and due_s < inf:
            delay_s = max(0.0, due_s - now, self._rest_until_s - now)
            self._round = asyncio.get_running_loop().call_later(delay_s, self._start_round)

    def _start_round(self) -> None:
        self._round = None
        started_s = time.thread_time()  # excludes the time of other threads on this core
        self.dispatch(ev.Round(self._round_s))
        took_s = self._round_s = time.thread_time() - started_s
        self.metrics.round_seconds.observe(took_s)
        share = self.config.round_share
        self._rest_until_s = time.monotonic() + took_s * (1 / share - 1)

    async def _keep_fleet_current(self) -> None:
        """Sends changes of the queue's length and drain time to gateways, which refuse requests
        by them, and of warnings."""
        while True:
            await asyncio.sleep(self.config.fleet_interval_s)
            warned = self._peers.warnings != self._sent_warnings
            if warned or self.state.fleet().differs_from(self._sent_fleet):
                self._send_fleet()

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

    def _send_to_gateway(self, action: ev.GatewayMessage) -> None:
        if outbox := self._gateways.get(action.link):
            outbox.put(encode_request_event(action))

    def _send_fleet(self) -> None:
        self._sent_fleet = self.state.fleet()
        self._sent_warnings = self._peers.warnings
        fleet = scheduler_pb2.SchedulerEvent(fleet=self._view_fleet(self._sent_fleet))
        for outbox in self._gateways.values():
            outbox.put(fleet)

    def _view_fleet(self, fleet: Fleet) -> scheduler_pb2.FleetView:
        view = encode_fleet(fleet)
        view.adapters.extend(self._adapters.usable())
        view.warnings.extend(self._peers.warnings)
        return view

    async def GetFleet(
        self, request: scheduler_pb2.GetFleetRequest, context: Any
    ) -> scheduler_pb2.FleetView:
        self._require_serving()
        return self._view_fleet(self.state.fleet())

    async def LoadAdapter(
        self, request: scheduler_pb2.Adapter, context: Any
    ) -> scheduler_pb2.AdapterResponse:
        self._require_serving()
        await self._adapters.load(request)
        return scheduler_pb2.AdapterResponse()

    async def UnloadAdapter(
        self, request: scheduler_pb2.Adapter, context: Any
    ) -> scheduler_pb2.AdapterResponse:
        self._require_serving()
        await self._adapters.unload(request)
        return scheduler_pb2.AdapterResponse()

    async def Why(
        self, request: scheduler_pb2.WhyRequest, context: Any
    ) -> scheduler_pb2.WhyResponse:
        if self.recorder is None:
            raise ServiceError(
                Code.UNAVAILABLE,
                "recording stories failed; see the scheduler's log, then restart it",
            )
        stories = find_stories(request.request_id, self.recorder, self.state)
        return scheduler_pb2.WhyResponse(stories=[encode_story(story) for story in stories])

    async def Submit(
        self, requests: AsyncIterator[scheduler_pb2.SubmitMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.SchedulerEvent]:
        with self._limits.stream("gateway"):
            first = await self._limits.read_hello(requests)
            self._require_serving()
            check_name("hello.gateway_id", first.hello.gateway_id)
            link = f"{first.hello.gateway_id}#{next(self._links)}"
            outbox: Outbox[scheduler_pb2.SchedulerEvent] = Outbox(self.config.outbox_limit)
            self._gateways[link] = outbox
            outbox.put(scheduler_pb2.SchedulerEvent(fleet=self._view_fleet(self.state.fleet())))
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
                check_request(message.request)
                self._submit(link, message.request)
            elif message.HasField("cancel"):
                cancel = message.cancel
                check_cancel(cancel)
                reason = decode_reason(cancel.reason) or FinishReason.CANCELLED
                self.dispatch(ev.Cancelled(link, cancel.request_id, reason, cancel.output_tokens))

    def _submit(self, link: str, message: scheduler_pb2.NewRequest) -> None:
        now = time.monotonic()
        request = decode_request(message, now)
        self._spans.submitted(request.request_id, message.traceparent, now)
        self._peers.forecasts.keep_text(request.request_id, message.text)
        self.dispatch(ev.Submitted(link, request))

    async def Attach(
        self, requests: AsyncIterator[scheduler_pb2.WorkerMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.Plan]:
        with self._limits.stream("worker"):
            first = await self._limits.read_hello(requests)
            self._require_serving()
            hello = first.hello
            check_hello(hello)
            check_announced(hello.address, names_of(context), context.peer())
            link = f"{hello.worker_id}#{next(self._links)}"
            outbox: Outbox[scheduler_pb2.Plan] = Outbox(self.config.outbox_limit)
            self._workers[link] = outbox
            try:
                reader = self._reader.read(link, hello, outbox, requests)
                async for plan in duplex(reader, outbox):
                    yield plan
                if link in self._displaced:
                    raise ServiceError(
                        Code.ALREADY_EXISTS, f"another worker attached as {hello.worker_id}"
                    )
            finally:
                del self._workers[link]
                self._displaced.discard(link)
                self._reader.detach(link, hello.worker_id)

    def _require_serving(self) -> None:
        if self._over:
            raise ServiceError(Code.UNAVAILABLE, "this scheduler is shutting down; connect again")
        if not self._leadership.leads:
            leads = f"the scheduler at {self._leadership.leader} leads"
            raise ServiceError(
                Code.UNAVAILABLE,
                f"this scheduler is a standby, {leads if self._leadership.leader else 'none leads'}"
                "; list the addresses of all schedulers in scheduler_address",
            )


def scheduler_limits(config: SchedulerConfig) -> SchedulerLimits:
    patience_s, weights = config.forecast_patience_s, config.tenant_weights
    suspicion = config.suspect_s, config.suspect_gaps
    return SchedulerLimits(config.max_queue, config.adopt_s, patience_s, weights, *suspicion)
