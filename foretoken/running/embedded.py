"""Runs the control plane in this process, and the predictor and each worker as child processes.

For a single core, and for tests that look into the control plane. Services of the control plane use
in-process channels, child processes use Unix sockets.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from foretoken.running.children.supervisor import Supervisor, supervise
from foretoken.running.console import status
from foretoken.running.console.fleets import fleet_over
from foretoken.running.console.progress import StartProgress
from foretoken.running.engines import ENGINES
from foretoken.running.options import ServeOptions, sections
from foretoken.running.shutdown import interruptible_start, run_in_daemon_thread
from foretoken.running.topology import Shape, arrange
from gateway.config import GatewayConfig
from observability.exposition import expose
from protos.generated import scheduler_pb2
from services.estimator.config import EstimatorConfig
from services.runtime.config import load
from services.runtime.network.channel import connect, host_port
from services.runtime.server import Lifecycle, listening
from services.runtime.startup import frozen_start, importing, rare_collections
from services.runtime.tasks import background
from services.runtime.telemetry.tracing import interceptors, open_tracing

if TYPE_CHECKING:
    from foretoken.running.control import ControlPlane
    from gateway.front import Front
    from services.scheduler.service import SchedulerService


CONTROL_MODULES = (
    "foretoken.running.control",
    "gateway.faces.app",
    "gateway.faces.http.serve",
    "gateway.faces.grpc.service",
)


@asynccontextmanager
async def embedded(
    options: ServeOptions, lifecycle: Lifecycle, progress: StartProgress | None = None
) -> AsyncIterator["Endpoints"]:
    """Starts the whole system; it is ready while the block runs, and drained afterwards."""
    overrides, report = sections(options), progress.report if progress else _ignore
    for kind in (GatewayConfig, EstimatorConfig, ENGINES[options.engine].config):
        load(kind, overrides[kind.section])  # report a mistake before anything starts
    async with AsyncExitStack() as stack:
        tracing = stack.enter_context(closing(open_tracing(overrides["tracing"])))
        folder = stack.enter_context(TemporaryDirectory(prefix="foretoken-"))
        topology = arrange([overrides], Shape.EMBEDDED, options.workers, 0, folder, options.engine)
        [model] = topology.models
        predictor = connect(model.predictor)
        stack.push_async_callback(predictor.close)
        peers = {"metrics_peers": json.dumps(topology.metrics_peers)}
        overrides["gateway"] = peers | overrides["gateway"]
        on_stage = progress.update if progress else _ignore
        supervisor = await stack.enter_async_context(
            supervise(topology.children, lifecycle, on_stage)
        )
        report("importing the control plane")
        await asyncio.wrap_future(run_in_daemon_thread(_import_control))  # signals are handled
        from foretoken.running.control import build_control_plane  # imported above, in a thread
        from gateway.faces.app import build_app
        from gateway.faces.grpc.service import mount
        from gateway.faces.http.serve import serving_http

        report("building the control plane")
        control = build_control_plane(overrides, predictor, CollectorRegistry(), tracing)
        front, scheduler = control.front, control.scheduler
        config = front.config
        await stack.enter_async_context(background(scheduler.run(), front.run()))
        await stack.enter_async_context(
            listening([control.scheduler_mount], model.scheduler, parts=front.parts)
        )
        grpc = await stack.enter_async_context(
            listening(
                [mount(front)],
                host_port(config.host, config.grpc_port),
                parts=front.parts,
                interceptors=interceptors(tracing.service(config.section)),
            )
        )
        http_port = await stack.enter_async_context(
            serving_http(build_app(front), config.host, config.http_port, config)
        )
        # Children stop before the services that they call.
        stack.push_async_callback(_stop_children, supervisor, scheduler)
        report("waiting for the workers")
        fleet = await status.wait_for_workers(
            control.channel, lambda: min(supervisor.count("worker"), options.awaited_workers)
        )
        http = f"http://{host_port(config.host, http_port)}"
        await status.wait_until_healthy(f"{http}/health")
        report("waiting for the predictor")
        await status.wait_for_predictor(predictor, lifecycle)
        supervisor.finish_start()
        yield Endpoints(control, host_port(config.host, grpc.port), http, fleet)
        grpc.set_serving(False)
        async with status.reporting_drain(partial(_count_live, front)):
            await lifecycle.drain(front.drain(), config.drain_s)


async def _stop_children(supervisor: Supervisor, scheduler: "SchedulerService") -> None:
    """Stops all children, once the predictor has received the last outcomes."""
    await scheduler.wind_up()
    await supervisor.stop(("worker", "predictor"))


async def _count_live(front: "Front") -> int:
    return front.live


def _import_control() -> None:
    with importing():
        for name in CONTROL_MODULES:
            import_module(name)


def _ignore(*stage: str) -> None:
    """Drops a progress report."""


@dataclass(frozen=True)
class Endpoints:
    """The addresses of a running system."""

    control: "ControlPlane"
    grpc: str
    http: str
    fleet: scheduler_pb2.FleetView

    async def scrape(self) -> str:
        """Returns the gateway's own metrics."""
        return expose(self.control.front.own_parts)


async def serve_embedded(options: ServeOptions, lifecycle: Lifecycle) -> None:
    """Serves until a signal. Raises Interrupted if it arrives before the system is ready."""
    with closing(StartProgress()) as progress:
        async with (
            interruptible_start(lifecycle) as end_start,
            embedded(options, lifecycle, progress) as system,
        ):
            end_start()
            progress.close()
            print(status.ready_line([system.fleet], system.http, system.grpc), flush=True)
            with frozen_start(), rare_collections():
                async with background(
                    status.show(fleet_over([system.control.channel]), system.scrape)
                ):
                    await lifecycle.draining.wait()
