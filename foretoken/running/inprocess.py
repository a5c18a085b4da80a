"""The control plane in this process, with the predictor and each worker as child processes.

Services of the control plane use in-process channels, child processes use Unix sockets. Nothing
listens for clients.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken.running.children.supervisor import Supervisor, supervise
from foretoken.running.console import status
from foretoken.running.console.progress import StartProgress
from foretoken.running.engines import ENGINES
from foretoken.running.options import ServeOptions, sections
from foretoken.running.shutdown import run_in_daemon_thread
from foretoken.running.state_folder import keeping_outcomes
from foretoken.running.topology import Shape, arrange
from gateway.config import GatewayConfig
from observability.tracing import Tracing
from protos.generated import scheduler_pb2
from services.estimator.config import EstimatorConfig
from services.runtime.config import load
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Protection, Role, TlsConfig, open_identity
from services.runtime.server import Lifecycle, listening
from services.runtime.startup import importing
from services.runtime.tasks import background
from services.runtime.telemetry.tracing import open_tracing

if TYPE_CHECKING:
    from foretoken.running.control import ControlPlane
    from services.scheduler.service import SchedulerService

CONTROL_MODULES = (
    "foretoken.running.control",
    "gateway.faces.app",
    "gateway.faces.http.batches.runner",
    "gateway.faces.http.serve",
    "gateway.faces.grpc.service",
)
HEALTH_POLL_S = 0.02


@dataclass(frozen=True)
class RunningSystem:
    """A started system. Workers may still be loading the model."""

    control: "ControlPlane"
    tracing: Tracing
    predictor: aio.Channel
    report: Callable[[str], None]  # receives the stages of the start
    _supervisor: Supervisor
    _lifecycle: Lifecycle
    _awaited_workers: int

    async def wait_until_ready(self) -> scheduler_pb2.FleetView:
        """Returns the fleet once requests can run and forecasts are available."""
        self.report("waiting for the workers")
        supervisor, awaited = self._supervisor, self._awaited_workers
        fleet = await status.wait_for_workers(
            self.control.channel, lambda: min(supervisor.count("worker"), awaited)
        )
        while not self.control.front.ready:  # noqa: ASYNC110 - no event tells both conditions
            await asyncio.sleep(HEALTH_POLL_S)
        self.report("waiting for the predictor")
        await status.wait_for_predictor(self.predictor, self._lifecycle)
        supervisor.finish_start()
        return fleet


@asynccontextmanager
async def running_system(
    options: ServeOptions, lifecycle: Lifecycle, progress: StartProgress | None = None
) -> AsyncIterator[RunningSystem]:
    """Starts everything but the listeners for clients. The children stop at the end of the block,
    before the services that they call. Raises ConfigError for a mistake in the settings."""
    given, report = sections(options), progress.report if progress else _ignore
    for kind in (GatewayConfig, EstimatorConfig, ENGINES[options.engine].config):
        load(kind, given[kind.section])  # report a mistake before anything starts
    async with AsyncExitStack() as stack:
        [overrides] = stack.enter_context(keeping_outcomes(options.state_dir, [given]))
        tracing = stack.enter_context(closing(open_tracing(overrides["tracing"])))
        folder = stack.enter_context(TemporaryDirectory(prefix="foretoken-"))
        topology = arrange([overrides], Shape.EMBEDDED, options.workers, 0, folder, options.engine)
        [model] = topology.models
        tls = load(TlsConfig, overrides[TlsConfig.section])
        identity = open_identity(tls)
        connector = Connector(identity)
        predictor = connector.connect(model.predictor, Role.PREDICTOR)
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

        report("building the control plane")
        control = build_control_plane(overrides, predictor, CollectorRegistry(), tracing, connector)
        front, scheduler = control.front, control.scheduler
        await stack.enter_async_context(background(scheduler.run(), front.run()))
        await stack.enter_async_context(
            listening(
                [control.scheduler_mount],
                model.scheduler,
                parts=front.parts,
                protection=Protection(identity, tls.insecure),
            )
        )
        stack.push_async_callback(_stop_children, supervisor, scheduler)
        yield RunningSystem(
            control, tracing, predictor, report, supervisor, lifecycle, options.awaited_workers
        )


async def _stop_children(supervisor: Supervisor, scheduler: "SchedulerService") -> None:
    """Stops all children, once the predictor has received the last outcomes."""
    await scheduler.wind_up()
    await supervisor.stop(("worker", "predictor"))


def _import_control() -> None:
    with importing():
        for name in CONTROL_MODULES:
            import_module(name)


def _ignore(*stage: str) -> None:
    """Drops a progress report."""
