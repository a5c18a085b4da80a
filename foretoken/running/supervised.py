"""Runs every service as a child process, and supervises them from this one."""

import asyncio
from contextlib import AsyncExitStack, closing
from tempfile import TemporaryDirectory

from foretoken.running.children.supervisor import supervise
from foretoken.running.cluster.places import CLUSTERS
from foretoken.running.console import status
from foretoken.running.console.progress import StartProgress
from foretoken.running.engines import ENGINES
from foretoken.running.options import Sections, ServeOptions, sections
from foretoken.running.ports import HeldPort
from foretoken.running.shutdown import interruptible_start
from foretoken.running.topology import ADVISERS, Shape, arrange
from gateway.config import GatewayConfig
from services.estimator.config import EstimatorConfig
from services.runtime.config import load
from services.runtime.network.channel import connect, host_port
from services.runtime.server import Lifecycle
from services.runtime.tasks import background
from services.worker.config import WorkerConfig

STOP_ORDER = (("gateway",), ("worker",), ("scheduler",), ADVISERS)


def worker_to_place(options: ServeOptions, overrides: Sections) -> WorkerConfig:
    """The settings that say what a worker needs of its place. An emulated one computes on no GPU.
    Raises ConfigError."""
    worker = load(ENGINES[options.engine].config, overrides["worker"])
    return worker.model_copy(update={"device": "cpu"}) if options.emulate else worker


async def serve_supervised(options: ServeOptions, lifecycle: Lifecycle) -> None:
    """Serves until a signal. Raises Interrupted if it arrives before the system is ready."""
    overrides = sections(options)
    for kind in (GatewayConfig, EstimatorConfig):
        load(kind, overrides[kind.section])  # report a mistake before anything starts
    worker = worker_to_place(options, overrides)
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="foretoken-"))
        host = overrides["gateway"]["host"]
        for name in ("http_port", "grpc_port"):
            port = stack.enter_context(HeldPort(host, int(overrides["gateway"][name])))
            overrides["gateway"][name] = str(port.number)
        progress = stack.enter_context(closing(StartProgress()))
        end_start = await stack.enter_async_context(interruptible_start(lifecycle))
        reserve = CLUSTERS[options.cluster]
        places = await stack.enter_async_context(reserve(worker, options.workers))
        overrides["scheduler"] = places.scheduler | overrides["scheduler"]
        shape = Shape.SEPARATE if options.separate else Shape.SHARED
        gateways = max(1, options.gateways)
        topology = arrange(
            overrides,
            shape,
            options.workers,
            gateways,
            folder,
            options.engine,
            places.workers,
        )
        addresses = (topology.predictor, topology.scheduler, *topology.gateways)
        channels = [connect(address) for address in addresses]
        for channel in channels:
            stack.push_async_callback(channel.close)
        predictor, scheduler, *fronts = channels
        supervisor = await stack.enter_async_context(
            supervise(
                topology.children,
                lifecycle,
                progress.update,
                launchers={"worker": places.launch},
            )
        )
        fleet = await status.wait_for_workers(
            scheduler, lambda: min(supervisor.count("worker"), options.awaited_workers)
        )
        ports = overrides["gateway"]
        http = f"http://{host_port(host, ports['http_port'])}"
        grpc = host_port(host, ports["grpc_port"])
        await asyncio.gather(*(front.channel_ready() for front in fronts))
        await status.wait_until_healthy(f"{http}/health")
        await status.wait_for_predictor(predictor, lifecycle)
        supervisor.finish_start()
        end_start()
        progress.close()
        print(status.ready_line(fleet, http, grpc), flush=True)
        async with background(status.show(scheduler, status.scrape_over(fronts))):
            await lifecycle.draining.wait()
        first, *rest = STOP_ORDER
        async with status.reporting_drain(status.live_counter(scheduler)):
            await supervisor.stop(first)
        for names in rest:
            await supervisor.stop(names)
