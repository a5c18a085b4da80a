"""Serves clients from this process, which has the control plane; see `inprocess`.

For a single core, and for tests that look into the control plane.
"""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from foretoken.running.console import status
from foretoken.running.console.fleets import fleet_over
from foretoken.running.console.progress import StartProgress
from foretoken.running.inprocess import running_system
from foretoken.running.options import ServeOptions
from foretoken.running.shutdown import interruptible_start
from observability.exposition import expose
from protos.generated import scheduler_pb2
from services.runtime.network.channel import host_port
from services.runtime.network.identity import FOR_CLIENTS
from services.runtime.server import Lifecycle, listening
from services.runtime.startup import frozen_start, rare_collections
from services.runtime.tasks import background
from services.runtime.telemetry.tracing import interceptors

if TYPE_CHECKING:
    from foretoken.running.control import ControlPlane
    from gateway.front import Front


@asynccontextmanager
async def embedded(
    options: ServeOptions, lifecycle: Lifecycle, progress: StartProgress | None = None
) -> AsyncIterator["Endpoints"]:
    """Starts the whole system; it is ready while the block runs, and drained afterwards."""
    async with (
        running_system(options, lifecycle, progress) as system,
        AsyncExitStack() as stack,
    ):
        from gateway.faces.app import build_app
        from gateway.faces.grpc.service import mount
        from gateway.faces.http.batches.runner import run_batches
        from gateway.faces.http.serve import serving_http

        front, tracing = system.control.front, system.tracing
        config = front.config
        grpc = await stack.enter_async_context(
            listening(
                [mount(front)],
                host_port(config.host, config.grpc_port),
                parts=front.parts,
                interceptors=interceptors(tracing.service(config.section)),
                protection=FOR_CLIENTS,
            )
        )
        http_port = await stack.enter_async_context(
            serving_http(build_app(front), config.host, config.http_port, config)
        )
        fleet = await system.wait_until_ready()
        await stack.enter_async_context(background(run_batches(front)))
        http = f"http://{host_port(config.host, http_port)}"
        yield Endpoints(system.control, host_port(config.host, grpc.port), http, fleet)
        grpc.set_serving(False)
        async with status.reporting_drain(partial(_count_live, front)):
            await lifecycle.drain(front.drain(), config.drain_s)


async def _count_live(front: "Front") -> int:
    return front.live


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
