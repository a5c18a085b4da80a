"""Everything on one machine: the control plane in this process, each worker in its own.

The control plane's services speak through in-process channels, workers through Unix sockets.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken import status
from foretoken.options import Sections, ServeOptions, chosen_preset, outcome_log, sections
from foretoken.processes import running
from gateway.config import GatewayConfig
from gateway.http.app import build_app
from gateway.http.serve import serving_http
from gateway.service import GatewayService
from protos import (
    batcher_pb2_grpc,
    estimator_pb2_grpc,
    predictor_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
)
from services.batcher.config import BatcherConfig
from services.batcher.service import BatcherService
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.channel import InProcessServer, connect
from services.runtime.config import load
from services.runtime.outcomelog.config import LogConfig
from services.runtime.server import Lifecycle, Mount, listening
from services.runtime.tasks import background
from services.scheduler.advice import Advisers
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService
from services.worker.config import WorkerConfig


@dataclass(frozen=True)
class Control:
    """The control plane's objects, wired to one another in process."""

    scheduler: SchedulerService
    gateway: GatewayService
    predictor: PredictorService
    channel: aio.Channel
    scheduler_mount: Mount


def build_control(overrides: Sections, registry: CollectorRegistry) -> Control:
    """Config → objects. The preset chooses the predictor unless the predictor's section does."""
    config = load(SchedulerConfig, overrides["scheduler"])
    preset = chosen_preset(overrides)
    advice = load(PredictorConfig, {"model": preset.predictor} | overrides["predictor"])
    outcomes = load(LogConfig, outcome_log(overrides, advice.model))
    batcher = load(BatcherConfig, overrides["batcher"])
    estimator = load(EstimatorConfig, overrides["estimator"])
    predictor = PredictorService(advice, registry, outcomes)
    server = InProcessServer()
    channel = server.channel()
    scheduler = SchedulerService(config, Advisers(channel, channel, channel), registry)
    gateway = GatewayService(load(GatewayConfig, overrides["gateway"]), channel, connect, registry)
    scheduler_mount = Mount(
        "foretoken.v1.Scheduler", scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler
    )
    for mount in (
        scheduler_mount,
        Mount(
            "foretoken.v1.Predictor",
            predictor_pb2_grpc.add_PredictorServicer_to_server,
            predictor,
        ),
        Mount(
            "foretoken.v1.Batcher",
            batcher_pb2_grpc.add_BatcherServicer_to_server,
            BatcherService(batcher, registry),
        ),
        Mount(
            "foretoken.v1.Estimator",
            estimator_pb2_grpc.add_EstimatorServicer_to_server,
            EstimatorService(estimator, registry),
        ),
    ):
        mount.add(mount.servicer, server)
    return Control(scheduler, gateway, predictor, channel, scheduler_mount)


@asynccontextmanager
async def embedded(options: ServeOptions, lifecycle: Lifecycle) -> AsyncIterator["Endpoints"]:
    """The whole system, ready, for as long as the block runs."""
    overrides = sections(options)
    load(WorkerConfig, overrides["worker"])  # a mistake in it is told before anything starts
    control = build_control(overrides, CollectorRegistry())
    gateway, scheduler = control.gateway, control.scheduler
    config = gateway.config
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foretoken-")))
        socket = f"unix:{folder}/scheduler.sock"
        await stack.enter_async_context(
            background(scheduler.run(), gateway.run(), control.predictor.run())
        )
        await stack.enter_async_context(listening([control.scheduler_mount], socket))
        grpc = await stack.enter_async_context(
            listening([gateway.mount()], f"{config.host}:{config.grpc_port}")
        )
        http_port = await stack.enter_async_context(
            serving_http(build_app(gateway), config.host, config.http_port)
        )
        for number in range(options.workers):
            await stack.enter_async_context(
                running(
                    "worker",
                    "services.worker",
                    {"worker": _worker(overrides, folder, socket, number)},
                    lifecycle,
                )
            )
        fleet = await status.fleet_of(control.channel, options.workers)
        http = f"http://{config.host}:{http_port}"
        await status.healthy(f"{http}/health")
        yield Endpoints(control, f"{config.host}:{grpc.port}", http, fleet)
        await grpc.set_serving(False)
        await lifecycle.drain(gateway.drain(), config.drain_s)


def _worker(overrides: Sections, folder: Path, scheduler: str, number: int) -> dict[str, str]:
    return {
        "worker_id": f"worker-{number}",
        "address": f"unix:{folder}/worker-{number}.sock",
        "scheduler_address": scheduler,
        "served_model_name": overrides["gateway"].get("served_model_name", ""),
        "exit_when_orphaned": "true",
        "log_level": "WARNING",
    } | overrides["worker"]


@dataclass(frozen=True)
class Endpoints:
    """Where a running system is reached."""

    control: Control
    grpc: str
    http: str
    fleet: scheduler_pb2.FleetView


async def serve_embedded(options: ServeOptions, lifecycle: Lifecycle) -> None:
    async with embedded(options, lifecycle) as system:
        print(status.ready_line(system.fleet, system.http, system.grpc), flush=True)
        async with background(status.show(system.control.channel)):
            await lifecycle.draining.wait()
