"""The worker's Attach stream to the scheduler: it sends a hello and reports, receives plans, and is
reopened when it ends."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from grpc import StatusCode, aio

from observability.tracing import NO_SPANS
from protos.generated import scheduler_pb2, scheduler_pb2_grpc
from services.core import HeldRequest, Report
from services.runtime.border import Ascending
from services.runtime.codecs.attach import decode_plan, encode_held, encode_report
from services.runtime.errors import InvalidArgument, OnInvalid
from services.runtime.network.backoff import Backoff
from services.runtime.network.streams import Outbox
from services.worker.adapters import AdapterHost, NoAdapters
from services.worker.codec import encode_adapters
from services.worker.config import WorkerConfig
from services.worker.engine.mailbox import (
    ApplyPlan,
    AttachScheduler,
    DetachScheduler,
    Reset,
    ReturnReports,
)
from services.worker.engine.runner import EngineRunner
from services.worker.spans import WorkerSpans

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
DETACH_S = 1.0  # time to write the last reports and for the scheduler to end the stream
CONNECT_S = 5.0  # of several schedulers, one may have to become the leader first
EARLY_S = 15.0  # a scheduler that starts beside this worker is available within this time
MAX_ADAPTER_SETS = 16  # that wait; the scheduler's further messages then wait, too
# Statuses that refuse this hello permanently.
REFUSALS = (StatusCode.INVALID_ARGUMENT, StatusCode.FAILED_PRECONDITION)


class UpStream:
    """The outgoing side of one stream: a hello, then reports. `unsent` are the reports not yet
    written."""

    def __init__(self, limit: int):
        self.unsent: deque[Report] = deque()
        self._outbox: Outbox[scheduler_pb2.WorkerMessage] = Outbox(limit)
        self._greeted = False

    def send_hello(self, hello: scheduler_pb2.WorkerHello) -> None:
        self._outbox.put(scheduler_pb2.WorkerMessage(hello=hello))
        self._greeted = True

    def send_draining(self, drain_s: float) -> None:
        message = scheduler_pb2.WorkerDraining(drain_s=drain_s)
        self._outbox.put(scheduler_pb2.WorkerMessage(draining=message))

    def send_adapters(self, states: scheduler_pb2.AdapterStates) -> None:
        self._outbox.put(scheduler_pb2.WorkerMessage(adapters=states))

    def send_alive(self) -> None:
        """Says that the process runs, once the hello is sent and nothing else waits."""
        if self._greeted and self._outbox.empty:
            self._outbox.put(scheduler_pb2.WorkerMessage(alive=scheduler_pb2.WorkerAlive()))

    def close(self) -> None:
        """Ends the outgoing side once everything is written."""
        self._outbox.close()

    def report(self, report: Report) -> None:
        if not self._outbox.overflowed:
            self.unsent.append(report)
            self._outbox.put(scheduler_pb2.WorkerMessage(report=encode_report(report)))

    async def __aiter__(self) -> AsyncIterator[scheduler_pb2.WorkerMessage]:
        async for message in self._outbox:
            yield message  # resumes once it is written
            if message.HasField("report"):
                self.unsent.popleft()


class Attachment:
    """Keeps one Attach stream open. Between two streams the worker continues its requests, for at
    most `orphan_hold_s`; the next hello lists them for adoption."""

    def __init__(
        self,
        config: WorkerConfig,
        channel: aio.Channel,
        runner: EngineRunner,
        hello: scheduler_pb2.WorkerHello,
        on_invalid: OnInvalid,
        spans: WorkerSpans | None = None,
        adapters: AdapterHost | None = None,
    ):
        """`on_invalid` is called for each invalid plan. `adapters` loads LoRA adapters; None: the
        engine holds none."""
        self._config = config
        self._adapters = adapters or NoAdapters()
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)
        self._runner = runner
        self._hello = hello
        self._on_invalid = on_invalid
        self._epoch = time.time_ns()  # later than that of an earlier process of this id
        self._spans = spans or WorkerSpans(NO_SPANS)
        self._upstream: UpStream | None = None  # until the engine has processed its end
        self._ended = asyncio.Event()
        self._ended.set()
        self._was_accepted = False  # by a scheduler, once
        self._draining = self._detached = False
        self._seen_s = 0.0
        # resets the engine if no scheduler returns
        self._giving_up: asyncio.TimerHandle | None = None
        runner.on_report = self._report

    async def run(self) -> None:
        """Runs until cancelled or drained. Raises ValueError with a sentence if reconnecting is
        useless: the scheduler has another worker of this name or refuses this one, or it is gone
        for `orphaned_s` and the configuration says to exit then."""
        self._seen_s = time.monotonic()
        pauses, failures = Backoff(FIRST_PAUSE_S, self._config.reconnect_s), 0
        while not self._detached:
            failures = 0 if await self._attach() else failures + 1
            self._give_up_if_orphaned()
            await asyncio.sleep(pauses.after_s(failures))

    async def drain(self) -> None:
        """Announces that this worker leaves, waits until no request runs, and detaches with all
        reports sent. The scheduler moves what other workers can continue."""
        self._draining = True
        if self._upstream:
            self._upstream.send_draining(self._config.drain_s)
        await self._runner.drain()
        self._detached = True
        if self._upstream:
            self._upstream.close()
            with suppress(TimeoutError):
                async with asyncio.timeout(DETACH_S):
                    await self._ended.wait()

    async def _attach(self) -> bool:
        """One stream from hello to its end; returns whether the scheduler sent a plan."""
        await self._ended.wait()
        upstream = UpStream(self._config.outbox_reports)
        call = self._stub.Attach(aiter(upstream))
        established, plans = False, Ascending("plan.seq")
        wanted: asyncio.Queue[scheduler_pb2.AdapterSet] = asyncio.Queue(MAX_ADAPTER_SETS)
        holding = asyncio.create_task(self._hold_adapters(wanted, upstream))
        beating = asyncio.create_task(self._beat(upstream))
        try:
            async with asyncio.timeout(CONNECT_S):
                await call.wait_for_connection()
            self._begin(upstream)
            async for message in call:
                if message.HasField("adapters"):  # also before the scheduler accepts this worker
                    await wanted.put(message.adapters)
                    continue
                established = True
                plan = decode_plan(message)
                plans.check(plan.seq)
                self._spans.on_plan(plan, time.monotonic())
                self._runner.send(ApplyPlan(plan))
                await self._runner.wait_for_room()
        except aio.AioRpcError as error:
            self._give_up_if_refused(error, established)
            self._log_absence(error.details() or error.code().name)
        except TimeoutError:
            self._log_absence(f"none accepts workers within {CONNECT_S:g} s")
        except InvalidArgument as error:
            self._on_invalid("Attach", error.field)
            text = "scheduler at %s sent an invalid plan (%s); run the same version there"
            log.error(text, self._config.scheduler_address, error)
        except asyncio.CancelledError:
            if _ends_our_task(call):
                raise
            log.warning("scheduler at %s: the stream was cut", self._config.scheduler_address)
        finally:
            holding.cancel()
            beating.cancel()
            call.cancel()
            if self._upstream is upstream:
                self._end()
            else:
                upstream.close()  # gRPC's writer waits for messages otherwise
        return established

    async def _beat(self, upstream: UpStream) -> None:
        """Says that the worker runs, as long as its engine does. A process can outlive its engine:
        a device may hang."""
        while True:
            await asyncio.sleep(self._config.heartbeat_s)
            if self._runner.pulse.silent_s(time.monotonic()) < self._config.hang_s:
                upstream.send_alive()

    async def _hold_adapters(
        self, wanted: asyncio.Queue[scheduler_pb2.AdapterSet], upstream: UpStream
    ) -> None:
        """Holds the adapters of each set, while plans go on, and answers with those that it has."""
        while True:
            asked = await wanted.get()
            errors = await self._adapters.hold({each.name: each.path for each in asked.adapters})
            for error in errors.values():
                log.warning("%s", error)
            upstream.send_adapters(
                scheduler_pb2.AdapterStates(
                    seq=asked.seq,
                    held=encode_adapters(self._adapters.held),
                    errors=[
                        scheduler_pb2.AdapterError(name=name, message=error)
                        for name, error in errors.items()
                    ],
                )
            )

    def _log_absence(self, why: str) -> None:
        """A scheduler that is still starting is no reason for a warning."""
        early = not self._was_accepted and time.monotonic() - self._seen_s < EARLY_S
        level = logging.DEBUG if early or self._draining else logging.WARNING
        log.log(level, "scheduler at %s: %s", self._config.scheduler_address, why)

    def _begin(self, upstream: UpStream) -> None:
        """Sends the hello and the events since the last stream; plans follow both."""
        if self._giving_up:
            self._giving_up.cancel()
        self._upstream = upstream
        self._ended.clear()
        self._runner.send(AttachScheduler(partial(self._send_hello, upstream)))

    def _send_hello(self, upstream: UpStream, held: Sequence[HeldRequest]) -> None:
        self._was_accepted = True
        hello = _with_held(self._hello, held)
        hello.epoch = self._epoch
        hello.adapters.extend(encode_adapters(self._adapters.held))
        upstream.send_hello(hello)
        if self._draining:
            upstream.send_draining(self._config.drain_s)

    def _end(self) -> None:
        self._runner.send(DetachScheduler(self._return_unsent))
        self._seen_s = time.monotonic()
        later = asyncio.get_running_loop().call_later
        self._giving_up = later(self._config.orphan_hold_s, self._runner.send, Reset())

    def _return_unsent(self) -> None:
        """Returns the unsent reports to the engine, once all for the ended stream are collected."""
        if self._upstream:
            self._runner.send(ReturnReports(tuple(self._upstream.unsent)))
            self._upstream.close()
        self._upstream = None
        self._ended.set()

    def _give_up_if_refused(self, error: aio.AioRpcError, established: bool) -> None:
        displaced = error.code() is StatusCode.ALREADY_EXISTS
        if displaced or (error.code() in REFUSALS and not established):
            raise ValueError(
                f"the scheduler at {self._config.scheduler_address} refuses this worker: "
                f"{error.details()}"
            ) from error

    def _give_up_if_orphaned(self) -> None:
        gone_s = time.monotonic() - self._seen_s
        if self._config.exit_when_orphaned and gone_s > self._config.orphaned_s:
            raise ValueError(
                f"the scheduler at {self._config.scheduler_address} has been gone for "
                f"{gone_s:.0f} s"
            )

    def _report(self, report: Report) -> None:
        self._spans.on_report(report, time.monotonic())
        if self._upstream:
            self._upstream.report(report)


def _ends_our_task(call: aio.StreamStreamCall[Any, Any]) -> bool:
    """Whether reading was cancelled because this task ends. gRPC, too, cancels a call: if the other
    side ends the stream during a write."""
    task = asyncio.current_task()
    return not call.cancelled() or bool(task and task.cancelling())


def _with_held(
    hello: scheduler_pb2.WorkerHello, held: Sequence[HeldRequest]
) -> scheduler_pb2.WorkerHello:
    """The hello of a worker that holds these requests."""
    complete = scheduler_pb2.WorkerHello()
    complete.CopyFrom(hello)
    complete.held.extend(encode_held(request) for request in held)
    return complete
