"""Reads a worker's stream: it takes part once it holds the adapters of its model."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

from protos.generated import scheduler_pb2
from services.core import WorkerView
from services.runtime.border import Ascending
from services.runtime.codecs.attach import (
    decode_drain_s,
    decode_held,
    decode_report,
    decode_worker_hello,
)
from services.runtime.errors import Code, ServiceError
from services.runtime.network.streams import Outbox
from services.scheduler.core import events as ev
from services.scheduler.core.jobs import WorkerJobs
from services.scheduler.links.adapters import AdapterRegistry
from services.scheduler.links.border import check_report
from services.scheduler.links.cost_models import CostModels

log = logging.getLogger(__name__)

MAX_EARLY = 4_096  # messages of a worker that loads adapters before it takes part

Messages = AsyncIterator[scheduler_pb2.WorkerMessage]


class WorkerReader:
    """Turns the messages of workers into events. `on_change` is called after each worker that comes
    or goes; `workers` are the attached ones."""

    def __init__(
        self,
        workers: Mapping[str, WorkerJobs],
        adapters: AdapterRegistry,
        cost_models: CostModels,
        dispatch: Callable[[ev.Event], None],
        on_change: Callable[[], None],
    ):
        self._workers, self._adapters, self._cost_models = workers, adapters, cost_models
        self._dispatch, self._on_change = dispatch, on_change

    async def read(
        self,
        link: str,
        hello: scheduler_pb2.WorkerHello,
        outbox: Outbox[scheduler_pb2.Plan],
        messages: Messages,
    ) -> None:
        """Reads until the stream ends. Raises ServiceError if the worker cannot hold an adapter
        that requests of its model may use, or if a later process of its name is attached."""
        early: list[scheduler_pb2.WorkerMessage] = []
        reports = Ascending("report.seq")
        if lacking := self._adapters.attach(link, hello, outbox):
            early = await self._wait_for_adapters(link, hello.model, lacking, messages)
        self._attach(link, hello)
        for message in early:
            self._read(link, hello, message, reports)
        async for message in messages:
            self._read(link, hello, message, reports)

    async def _wait_for_adapters(
        self,
        link: str,
        model: str,
        lacking: asyncio.Future[Mapping[str, str]],
        messages: Messages,
    ) -> list[scheduler_pb2.WorkerMessage]:
        """Returns the messages that came before the worker's answer."""
        early: list[scheduler_pb2.WorkerMessage] = []
        async for message in messages:
            if message.HasField("adapters"):
                self._adapters.on_states(link, message.adapters)
            else:
                early.append(message)
            if lacking.done() or len(early) > MAX_EARLY:
                break
        if not lacking.done():
            raise ServiceError(Code.UNAVAILABLE, "the worker has not loaded its model's adapters")
        for name, reason in lacking.result().items():
            if self._adapters.all_hold(model, name):
                raise ServiceError(Code.FAILED_PRECONDITION, reason)
        return early

    def _attach(self, link: str, hello: scheduler_pb2.WorkerHello) -> None:
        view = decode_worker_hello(hello)
        self._fence(view)
        self._adapters.admit(link)
        self._cost_models.forget_worker(view.worker_id)
        self._dispatch(ev.WorkerAttached(link, view, decode_held(hello)))
        self._cost_models.observe(view.worker_id, hello.profile, hello.swaps)
        self._on_change()
        log.info("worker %s attached: %s, %d KV tokens", view.worker_id, view.model, view.kv_tokens)

    def detach(self, link: str, worker_id: str) -> None:
        """The worker's stream has ended."""
        self._adapters.detach(link)
        self._dispatch(ev.WorkerLost(link, worker_id))
        if worker_id not in self._workers:
            self._cost_models.forget_worker(worker_id)
        self._on_change()
        log.info("worker %s detached", worker_id)

    def _fence(self, view: WorkerView) -> None:
        """Raises ServiceError for a process while a later one of its name is attached."""
        known = self._workers.get(view.worker_id)
        if known and view.epoch < known.view.epoch:
            log.warning("worker %s is refused: a later process attached as it", view.worker_id)
            raise ServiceError(
                Code.ALREADY_EXISTS, f"a later process attached as worker {view.worker_id}"
            )

    def _read(
        self,
        link: str,
        hello: scheduler_pb2.WorkerHello,
        message: scheduler_pb2.WorkerMessage,
        reports: Ascending,
    ) -> None:
        """`reports`: the numbers of those on this stream."""
        worker_id = hello.worker_id
        match message.WhichOneof("kind"):
            case "report":
                report = message.report
                check_report(report, hello)
                reports.check(report.seq)
                self._dispatch(ev.Reported(link, worker_id, decode_report(report)))
                self._cost_models.observe(worker_id, report.timings, report.swaps)
            case "draining":
                drain_s = decode_drain_s(message.draining)
                self._dispatch(ev.WorkerDraining(link, worker_id, drain_s))
                log.info("worker %s drains within %g s", worker_id, drain_s)
            case "alive":
                self._dispatch(ev.WorkerAlive(link, worker_id))
            case "adapters":
                self._adapters.on_states(link, message.adapters)
