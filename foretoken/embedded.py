"""Everything on one machine: the control plane in this process, the predictor and each worker in
processes of their own.

The control plane's services speak through in-process channels, the others through Unix sockets.
"""

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from foretoken import status
from foretoken.options import Sections, ServeOptions, local_worker, predictor_sections, sections
from foretoken.processes import kept_running, running
from gateway.config import GatewayConfig
from protos import scheduler_pb2
from services.estimator.config import EstimatorConfig
from services.predictor.config import PredictorConfig
from services.runtime.channel import connect
from services.runtime.config import load
from services.runtime.outcomelog.config import LogConfig
from services.runtime.server import Lifecycle, listening
from services.runtime.startup import importing
from services.runtime.tasks import background
from services.worker.config import WorkerConfig

if TYPE_CHECKING:
    from foretoken.control import Control


@asynccontextmanager
async def embedded(options: ServeOptions, lifecycle: Lifecycle) -> AsyncIterator["Endpoints"]:
    """The whole system, ready, for as long as the block runs."""
    overrides = sections(options)
    for kind in (GatewayConfig, EstimatorConfig, WorkerConfig):
        load(kind, overrides[kind.section])  # a mistake is told before anything starts
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foretoken-")))
        socket = f"unix:{folder}/scheduler.sock"
        advice = _predictor(overrides, folder)
        predictor = connect(advice["predictor"]["address"])
        stack.push_async_callback(predictor.close)
        processes = await stack.enter_async_context(AsyncExitStack())
        for number in range(options.workers):
            worker = _worker(overrides, folder, socket, number, options.workers)
            await processes.enter_async_context(
                running("worker", "services.worker", {"worker": worker}, lifecycle)
            )
        await processes.enter_async_context(
            kept_running("predictor", "services.predictor", advice, lifecycle, predictor)
        )
        with importing():
            from foretoken.control import build_app, build_control, serving_http
        control = build_control(overrides, predictor, CollectorRegistry())
        gateway, scheduler = control.gateway, control.scheduler
        config = gateway.config
        await stack.enter_async_context(background(scheduler.run(), gateway.run()))
        await stack.enter_async_context(listening([control.scheduler_mount], socket))
        grpc = await stack.enter_async_context(
            listening([gateway.mount()], f"{config.host}:{config.grpc_port}")
        )
        http_port = await stack.enter_async_context(
            serving_http(build_app(gateway), config.host, config.http_port)
        )
        stack.push_async_exit(processes)  # begun first, ended first: nobody misses a peer
        fleet = await status.fleet_of(control.channel, options.workers)
        http = f"http://{config.host}:{http_port}"
        await status.healthy(f"{http}/health")
        yield Endpoints(control, f"{config.host}:{grpc.port}", http, fleet)
        await grpc.set_serving(False)
        await lifecycle.drain(gateway.drain(), config.drain_s)


def _predictor(overrides: Sections, folder: Path) -> Sections:
    """Raises ConfigError for values that can't be; what only it can tell, it tells when it
    starts."""
    own = {
        "address": f"unix:{folder}/predictor.sock",
        "started_by": str(os.getpid()),
        "log_level": "WARNING",
    }
    told = predictor_sections(overrides, own)
    load(PredictorConfig, told["predictor"])
    load(LogConfig, told["log"])
    return told


def _worker(
    overrides: Sections, folder: Path, scheduler: str, number: int, workers: int
) -> dict[str, str]:
    return {
        **local_worker(number, workers),
        "address": f"unix:{folder}/worker-{number}.sock",
        "scheduler_address": scheduler,
        "served_model_name": overrides["gateway"].get("served_model_name", ""),
        "exit_when_orphaned": "true",
        "log_level": "WARNING",
    } | overrides["worker"]


@dataclass(frozen=True)
class Endpoints:
    """Where a running system is reached."""

    control: "Control"
    grpc: str
    http: str
    fleet: scheduler_pb2.FleetView


async def serve_embedded(options: ServeOptions, lifecycle: Lifecycle) -> None:
    async with embedded(options, lifecycle) as system:
        print(status.ready_line(system.fleet, system.http, system.grpc), flush=True)
        async with background(status.show(system.control.channel)):
            await lifecycle.draining.wait()
