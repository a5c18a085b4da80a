"""Everything on one machine: the control plane in this process, the predictor and each worker in
processes of their own.

The control plane's services speak through in-process channels, the others through Unix sockets.
"""

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from foretoken.running.children.minding import Minder, minding
from foretoken.running.children.processes import Child
from foretoken.running.leaving import aside, starting
from foretoken.running.options import (
    Sections,
    ServeOptions,
    local_worker,
    predictor_sections,
    sections,
)
from foretoken.running.told import status
from foretoken.running.told.progress import Progress
from gateway.config import GatewayConfig
from observability.exposition import expose
from protos.generated import scheduler_pb2
from services.estimator.config import EstimatorConfig
from services.predictor.config import PredictorConfig
from services.runtime.channel import connect
from services.runtime.config import COMMON, load
from services.runtime.observed.tracing import interceptors, tracing_of
from services.runtime.outcomelog.config import LogConfig
from services.runtime.server import Lifecycle, listening
from services.runtime.startup import importing
from services.runtime.tasks import background
from services.worker.config import WorkerConfig

if TYPE_CHECKING:
    from foretoken.running.control import Control
    from gateway.gateway import Gateway
    from services.scheduler.service import SchedulerService


CONTROL = (
    "foretoken.running.control",
    "gateway.faces.http.app",
    "gateway.faces.http.serve",
    "gateway.faces.grpc.service",
)


@asynccontextmanager
async def embedded(
    options: ServeOptions, lifecycle: Lifecycle, progress: Progress | None = None
) -> AsyncIterator["Endpoints"]:
    """The whole system, ready, for as long as the block runs."""
    overrides, say = sections(options), progress.say if progress else _unheard
    for kind in (GatewayConfig, EstimatorConfig, WorkerConfig):
        load(kind, overrides[kind.section])  # a mistake is told before anything starts
    async with AsyncExitStack() as stack:
        tracing = stack.enter_context(closing(tracing_of(overrides["tracing"])))
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="foretoken-")))
        socket = f"unix:{folder}/scheduler.sock"
        advice = _predictor(overrides, folder)
        predictor = connect(advice["predictor"]["address"])
        stack.push_async_callback(predictor.close)
        workers = [
            _worker(overrides, folder, socket, number, options.workers)
            for number in range(options.workers)
        ]
        peers = [settings["address"] for settings in (*workers, advice["predictor"])]
        overrides["gateway"] = {"metrics_peers": json.dumps(peers)} | overrides["gateway"]
        children = _children(overrides, workers, advice)
        told = progress.told if progress else _unheard
        minder = await stack.enter_async_context(minding(children, lifecycle, told))
        say("importing the control plane")
        await aside(_import_control)
        from foretoken.running.control import build_control  # by now imported, as CONTROL
        from gateway.faces.grpc.service import mount
        from gateway.faces.http.app import build_app
        from gateway.faces.http.serve import serving_http

        say("building the control plane")
        control = build_control(overrides, predictor, CollectorRegistry(), tracing)
        gateway, scheduler = control.gateway, control.scheduler
        config = gateway.config
        await stack.enter_async_context(background(scheduler.run(), gateway.run()))
        await stack.enter_async_context(
            listening([control.scheduler_mount], socket, parts=gateway.parts)
        )
        grpc = await stack.enter_async_context(
            listening(
                [mount(gateway)],
                f"{config.host}:{config.grpc_port}",
                parts=gateway.parts,
                interceptors=interceptors(tracing.service(config.section)),
            )
        )
        http_port = await stack.enter_async_context(
            serving_http(build_app(gateway), config.host, config.http_port, config)
        )
        # Before what they speak to: nobody misses a peer.
        stack.push_async_callback(_end_children, minder, scheduler)
        say("waiting for the workers")
        fleet = await status.fleet_of(control.channel, lambda: minder.count("worker"))
        http = f"http://{config.host}:{http_port}"
        await status.healthy(f"{http}/health")
        say("waiting for the predictor")
        await status.forecasting(predictor, lifecycle)
        minder.settle()
        yield Endpoints(control, f"{config.host}:{grpc.port}", http, fleet)
        await grpc.set_serving(False)
        async with status.saying_what_is_left(partial(_live, gateway)):
            await lifecycle.drain(gateway.drain(), config.drain_s)


async def _end_children(minder: Minder, scheduler: "SchedulerService") -> None:
    """Once the predictor was told what came of the last requests, all at the same time."""
    await scheduler.wind_up()
    await minder.stop(("worker", "predictor"))


async def _live(gateway: "Gateway") -> int:
    return gateway.live


def _import_control() -> None:
    with importing():
        for name in CONTROL:
            import_module(name)


def _unheard(*stage: str) -> None:
    """Told to nobody."""


def _children(
    overrides: Sections, workers: Sequence[dict[str, str]], advice: Sections
) -> list[Child]:
    common = {name: overrides[name] for name in COMMON}
    return [
        *(
            Child(worker["worker_id"], "worker", "services.worker", {"worker": worker, **common})
            for worker in workers
        ),
        Child("predictor", "predictor", "services.predictor", advice | common),
    ]


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
        "started_by": str(os.getpid()),
        "log_level": "WARNING",
    } | overrides["worker"]


@dataclass(frozen=True)
class Endpoints:
    """Where a running system is reached."""

    control: "Control"
    grpc: str
    http: str
    fleet: scheduler_pb2.FleetView

    async def scrape(self) -> str:
        """What the gateway has counted."""
        return expose(self.control.gateway.parts[:1])


async def serve_embedded(options: ServeOptions, lifecycle: Lifecycle) -> None:
    """Raises Interrupted where a signal comes before it is ready."""
    with closing(Progress()) as progress:
        async with (
            starting(lifecycle) as is_ready,
            embedded(options, lifecycle, progress) as system,
        ):
            is_ready()
            progress.close()
            print(status.ready_line(system.fleet, system.http, system.grpc), flush=True)
            async with background(status.show(system.control.channel, system.scrape)):
                await lifecycle.draining.wait()
