"""Assembles the service around an engine: runner, servicer, attachment and metrics."""

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry

from observability.metrics import worker as catalogue
from observability.tracing import Tracing
from protos.generated import scheduler_pb2, worker_pb2_grpc
from services.costs import StepTiming, SwapTiming
from services.runtime.main import Unit
from services.runtime.network.connector import Connector
from services.runtime.server import Mount
from services.runtime.startup import Laps, process_age_s
from services.runtime.telemetry.invalid_messages import InvalidMessages
from services.worker.adapters import AdapterHost
from services.worker.attachment import Attachment
from services.worker.codec import encode_hello
from services.worker.config import WorkerConfig
from services.worker.engine.interface import WorkerEngine
from services.worker.engine.loop import EngineLoop
from services.worker.engine.profile import profile, profile_swaps
from services.worker.engine.runner import EngineRunner
from services.worker.metrics import WorkerMetrics
from services.worker.service import WorkerService
from services.worker.spans import WorkerSpans

log = logging.getLogger(__name__)

CHECK_S = 1.0  # between two checks of the replica, also of an idle worker


def build_unit(
    config: WorkerConfig,
    engine: WorkerEngine,
    thread: Executor,
    registry: CollectorRegistry,
    laps: Laps,
    tracing: Tracing,
    about: str,
    connector: Connector,
    adapters: Callable[[EngineRunner], AdapterHost] | None = None,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Unit:
    """Measures the engine and serves it, both in `thread`. `about` describes its computation in the
    log. `adapters` makes what loads LoRA adapters; None: the engine holds none. `beside` runs as
    long as the service."""
    swaps: Sequence[SwapTiming] = []
    timings: list[StepTiming] = []
    if limit_s := config.profile_s:
        swaps = thread.submit(profile_swaps, engine, limit_s).result()
        timings = thread.submit(profile, engine, limit_s).result()
    laps.lap("profile")
    limits, token_bytes = engine.state.limits, engine.kv_bytes_per_token
    hello = encode_hello(config, limits, engine.placement, token_bytes, timings, swaps, str(laps))
    log_ready(config, hello, about, laps)
    metrics = WorkerMetrics(registry, engine.state, engine.phases, engine.host_block_bytes)
    runner = EngineRunner(partial(EngineLoop, engine, metrics), thread)
    host = adapters(runner) if adapters else None
    return serve_runner(
        config,
        runner,
        hello,
        registry,
        tracing,
        connector,
        engine.check,
        engine.close,
        adapters=host,
        beside=beside,
    )


def log_ready(
    config: WorkerConfig, hello: scheduler_pb2.WorkerHello, about: str, laps: Laps
) -> None:
    log.info(
        "%s: %s, %d KV tokens, %s; up in %.1f s: %s",
        config.model_name,
        hello.placement,
        hello.kv_tokens,
        about,
        process_age_s(),
        laps,
    )


def serve_runner(
    config: WorkerConfig,
    runner: EngineRunner,
    hello: scheduler_pb2.WorkerHello,
    registry: CollectorRegistry,
    tracing: Tracing,
    connector: Connector,
    check: Callable[[], None],
    close: Callable[[], None],
    attach: Callable[[Attachment], Coroutine[Any, Any, None]] = Attachment.run,
    adapters: AdapterHost | None = None,
    beside: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> Unit:
    """Serves a runner's engine to gateways and to the scheduler. `check` raises ValueError once the
    engine is lost, even if it is idle; `close` ends it. `attach` runs the attachment, and may read
    `hello` only then; `beside` runs as long."""
    spans = WorkerSpans(tracing.service(config.section))
    service = WorkerService(config, runner, spans)
    invalid = InvalidMessages(registry, catalogue.INVALID_MESSAGES, "Stream", "Attach")
    channel = connector.connect_to_leader(config.scheduler_address)
    attachment = Attachment(config, channel, runner, hello, invalid.count, spans, adapters)

    async def run() -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(runner.run())
                tasks.create_task(attach(attachment))
                tasks.create_task(_watch(check))
                if beside:
                    tasks.create_task(beside())
        finally:
            close()
            await channel.close()

    mount = Mount(
        "foretoken.v1.Worker",
        worker_pb2_grpc.add_WorkerServicer_to_server,
        service,
        on_invalid=invalid.count,
    )
    return Unit([mount], run, attachment.drain)


async def _watch(check: Callable[[], None]) -> None:
    """Raises ValueError once the replica is lost, even if the engine is idle."""
    while True:
        check()
        await asyncio.sleep(CHECK_S)
