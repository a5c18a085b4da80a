"""The scheduler's servicer: decode, step, carry out. It alone reads the clock."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack
from itertools import count
from math import inf
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from protos import scheduler_pb2, scheduler_pb2_grpc
from services.core import FinishReason
from services.runtime.attach_codec import decode_report, decode_worker_hello, encode_plan
from services.runtime.codec import decode_reason
from services.runtime.errors import InvalidArgument
from services.runtime.streams import Outbox, duplex
from services.scheduler import events as ev
from services.scheduler.advice import Advice, Advisers
from services.scheduler.codec import decode_request, encode_fleet, encode_request_event
from services.scheduler.config import SchedulerConfig
from services.scheduler.eventlog import EventLog
from services.scheduler.ledger import Limits
from services.scheduler.metrics import SchedulerMetrics
from services.scheduler.presets import choose
from services.scheduler.state import SchedulerState

log = logging.getLogger(__name__)

GatewayEvents = ev.Place | ev.Preempt | ev.Resume | ev.Finish | ev.Refuse


class SchedulerService(scheduler_pb2_grpc.SchedulerServicer):
    """Owns the state and every stream into it. `run` must be running for answers to come.

    Raises ValueError at construction for an unknown policy or choice.
    """

    def __init__(self, config: SchedulerConfig, advisers: Advisers, registry: CollectorRegistry):
        preset = choose(config.policy, config.preset)
        self.config = config
        self.state = SchedulerState(preset, Limits(config.max_queue, config.offer_window))
        self.metrics = SchedulerMetrics(registry)
        self._advice = Advice(config, advisers, self)
        self._links = count(1)
        self._gateways: dict[str, Outbox[scheduler_pb2.SchedulerEvent]] = {}
        self._workers: dict[str, Outbox[scheduler_pb2.Plan]] = {}
        self._retimed = asyncio.Event()
        self._due_s = inf  # when the next Tick is due, as the timekeeper has it
        self._emptied = asyncio.Event()
        self._log: EventLog | None = None
        self._perform: dict[str, Callable[[Any], None]] = {
            "ask_forecast": self._advice.ask_forecast,
            "ask_batch": self._advice.ask_batch,
            "learn": self._advice.learn,
            "send_plan": self._send_plan,
            "place": self._tell_gateway,
            "preempt": self._tell_gateway,
            "resume": self._tell_gateway,
            "finish": self._tell_gateway,
            "refuse": self._tell_gateway,
        }

    async def run(self) -> None:
        """Keep deadlines and talk to the advisers, until cancelled."""
        with ExitStack() as stack:
            if self.config.event_log:
                file = EventLog(Path(self.config.event_log), self.config.event_log_max_bytes)
                self._log = stack.enter_context(file)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._keep_time())
                tasks.create_task(self._advice.run())

    async def drain(self) -> None:
        """Refuse new requests; return when the last one has ended."""
        self.dispatch(ev.Draining())
        while self.state.jobs:
            self._emptied.clear()
            await self._emptied.wait()

    def dispatch(self, event: ev.Event) -> None:
        """One step of the state, and everything it asks for."""
        now = time.monotonic()
        actions = self.state.step(event, now)
        if self._log:
            self._log.append(now, event, actions)
        self.metrics.stepped(event, actions, self.state)
        for action in actions:
            self._perform[action.kind](action)
        if not self.state.jobs:
            self._emptied.set()
        if self.state.next_deadline() < self._due_s:
            self._retimed.set()

    async def _keep_time(self) -> None:
        while True:
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

    def _tell_gateway(self, action: GatewayEvents) -> None:
        if outbox := self._gateways.get(action.link):
            outbox.put(encode_request_event(action))

    def _tell_fleet(self) -> None:
        fleet = scheduler_pb2.SchedulerEvent(fleet=encode_fleet(self.state.ledger.fleet()))
        for outbox in self._gateways.values():
            outbox.put(fleet)

    # RPCs

    async def GetFleet(
        self, request: scheduler_pb2.GetFleetRequest, context: Any
    ) -> scheduler_pb2.FleetView:
        return encode_fleet(self.state.ledger.fleet())

    async def Submit(
        self, requests: AsyncIterator[scheduler_pb2.SubmitMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.SchedulerEvent]:
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("hello", "the first message of Submit must be a hello")
        link = f"{first.hello.gateway_id}#{next(self._links)}"
        outbox: Outbox[scheduler_pb2.SchedulerEvent] = Outbox(self.config.outbox_limit)
        self._gateways[link] = outbox
        outbox.put(scheduler_pb2.SchedulerEvent(fleet=encode_fleet(self.state.ledger.fleet())))
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

    def _submit(self, link: str, message: scheduler_pb2.NewRequest) -> None:
        request = decode_request(message, time.monotonic())
        self._advice.keep_text(request.request_id, message.text)
        self.dispatch(ev.Submitted(link, request))

    async def Attach(
        self, requests: AsyncIterator[scheduler_pb2.WorkerMessage], context: Any
    ) -> AsyncIterator[scheduler_pb2.Plan]:
        first = await anext(aiter(requests), None)
        if first is None or not first.HasField("hello"):
            raise InvalidArgument("hello", "the first message of Attach must be a hello")
        view = decode_worker_hello(first.hello)
        link = f"{view.worker_id}#{next(self._links)}"
        outbox: Outbox[scheduler_pb2.Plan] = Outbox(self.config.outbox_limit)
        self._workers[link] = outbox
        self._advice.unwatch(view.worker_id)
        self.dispatch(ev.WorkerAttached(link, view))
        self._advice.observe(view.worker_id, first.hello.profile, first.hello.swaps)
        self._tell_fleet()
        log.info("worker %s attached: %s, %d KV tokens", view.worker_id, view.model, view.kv_tokens)
        try:
            reader = self._read_worker(link, view.worker_id, requests)
            async for plan in duplex(reader, outbox):
                yield plan
        finally:
            del self._workers[link]
            self.dispatch(ev.WorkerLost(link, view.worker_id))
            if view.worker_id not in self.state.workers:
                self._advice.unwatch(view.worker_id)
            self._tell_fleet()
            log.info("worker %s left", view.worker_id)

    async def _read_worker(
        self, link: str, worker_id: str, requests: AsyncIterator[scheduler_pb2.WorkerMessage]
    ) -> None:
        async for message in requests:
            if message.HasField("report"):
                report = message.report
                self.dispatch(ev.Reported(link, worker_id, decode_report(report)))
                self._advice.observe(worker_id, report.timings, report.swaps)
