"""The worker's line to the scheduler: dial, say hello, report up, take plans; and dial again."""

import asyncio
import logging
import time

from grpc import aio

from protos import scheduler_pb2, scheduler_pb2_grpc
from services.core import Report
from services.runtime.attach_codec import decode_plan, encode_report
from services.runtime.streams import Outbox
from services.worker.config import WorkerConfig
from services.worker.runner import EngineRunner

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1

Up = Outbox[scheduler_pb2.WorkerMessage]


class Attachment:
    """Keeps one Attach stream up. While there is none, the worker holds no requests."""

    def __init__(
        self,
        config: WorkerConfig,
        channel: aio.Channel,
        runner: EngineRunner,
        hello: scheduler_pb2.WorkerHello,
    ):
        self._config = config
        self._stub = scheduler_pb2_grpc.SchedulerStub(channel)
        self._runner = runner
        self._hello = hello
        self._up: Up | None = None
        self._seen_s = 0.0
        runner.on_report = self._report

    async def run(self) -> None:
        """Until cancelled, or orphaned: then ValueError, where config asks for it."""
        self._seen_s = time.monotonic()
        pause_s = FIRST_PAUSE_S
        while True:
            attached = await self._attach()
            self._give_up_if_orphaned()
            pause_s = FIRST_PAUSE_S if attached else min(2 * pause_s, self._config.reconnect_s)
            await asyncio.sleep(pause_s)

    async def _attach(self) -> bool:
        """One stream from hello to its end; whether it stood at all."""
        self._runner.reset()
        up = self._up = Outbox(self._config.outbox_reports)
        up.put(scheduler_pb2.WorkerMessage(hello=self._hello))
        call = self._stub.Attach(aiter(up))
        attached = False
        try:
            await call.wait_for_connection()
            attached = True
            async for plan in call:
                self._runner.apply(decode_plan(plan))
        except aio.AioRpcError as error:
            log.warning("scheduler at %s: %s", self._config.scheduler_address, error.details())
        finally:
            call.cancel()
            self._up = None
            self._runner.reset()
            if attached:
                self._seen_s = time.monotonic()
        return attached

    def _give_up_if_orphaned(self) -> None:
        gone_s = time.monotonic() - self._seen_s
        if self._config.exit_when_orphaned and gone_s > self._config.orphaned_s:
            raise ValueError(
                f"the scheduler at {self._config.scheduler_address} has been gone for "
                f"{gone_s:.0f} s"
            )

    def _report(self, report: Report) -> None:
        if self._up:
            self._up.put(scheduler_pb2.WorkerMessage(report=encode_report(report)))
