"""Runs every service as a child process, and supervises them from this one."""

import asyncio
from contextlib import AsyncExitStack, closing
from tempfile import TemporaryDirectory
from urllib.parse import quote

from foretoken.running.children.supervisor import supervise
from foretoken.running.cluster.places import CLUSTERS
from foretoken.running.console import status
from foretoken.running.console.fleets import fleet_over
from foretoken.running.console.progress import StartProgress
from foretoken.running.engines import ENGINES
from foretoken.running.options import Sections, ServeOptions, model_sections
from foretoken.running.ports import HeldPort
from foretoken.running.shutdown import interruptible_start
from foretoken.running.state_folder import keeping_outcomes
from foretoken.running.topology import ADVISERS, Shape, arrange
from gateway.config import GatewayConfig
from services.estimator.config import EstimatorConfig
from services.runtime.config import load
from services.runtime.network.channel import host_port
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Role, TlsConfig, open_identity
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
    given = model_sections(options)
    for kind in (GatewayConfig, EstimatorConfig):
        load(kind, given[0][kind.section])  # report a mistake before anything starts
    connector = Connector(open_identity(load(TlsConfig, given[0][TlsConfig.section])))
    worker = worker_to_place(options, given[0])
    async with AsyncExitStack() as stack:
        models = stack.enter_context(keeping_outcomes(options.state_dir, given))
        overrides = models[0]  # also the gateways' and this process's
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
            models,
            shape,
            options.workers,
            gateways,
            folder,
            options.engine,
            places.workers,
        )
        predictors, schedulers, fronts = (
            [connector.connect(address, role) for address in addresses]
            for role, addresses in (
                (Role.PREDICTOR, [model.predictor for model in topology.models]),
                (Role.SCHEDULER, [model.scheduler for model in topology.models]),
                (Role.GATEWAY, topology.gateways),
            )
        )
        for channel in (*predictors, *schedulers, *fronts):
            stack.push_async_callback(channel.close)
        supervisor = await stack.enter_async_context(
            supervise(
                topology.children,
                lifecycle,
                progress.update,
                launchers={"worker": places.launch},
            )
        )
        fleets = [
            await status.wait_for_workers(
                scheduler, lambda: min(supervisor.count("worker"), options.awaited_workers)
            )
            for scheduler in schedulers
        ]
        ports = overrides["gateway"]
        http = f"http://{host_port(host, ports['http_port'])}"
        grpc = host_port(host, ports["grpc_port"])
        await asyncio.gather(*(front.channel_ready() for front in fronts))
        for model in topology.models:
            await status.wait_until_healthy(f"{http}/health?model={quote(model.name, safe='')}")
        for predictor in predictors:
            await status.wait_for_predictor(predictor, lifecycle)
        supervisor.finish_start()
        end_start()
        progress.close()
        print(status.ready_line(fleets, http, grpc), flush=True)
        ask = fleet_over(schedulers)
        async with background(status.show(ask, status.scrape_over(fronts))):
            await lifecycle.draining.wait()
        first, *rest = STOP_ORDER
        async with status.reporting_drain(status.live_counter(ask)):
            await supervisor.stop(first)
        for names in rest:
            await supervisor.stop(names)
