"""The control plane in this process: scheduler, estimator and gateway, wired to one another.

Imported once the processes of the others have been started: it takes a second, and so do they.
"""

from dataclasses import dataclass

from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken.running.options import Sections
from gateway.config import GatewayConfig
from gateway.gateway import Gateway
from observability.exposition import Part
from observability.tracing import OFF, Tracing
from protos.generated import estimator_pb2_grpc, scheduler_pb2_grpc
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.runtime.channel import InProcessServer, connect
from services.runtime.config import load
from services.runtime.server import Mount
from services.scheduler.config import SchedulerConfig
from services.scheduler.links.peers import PeerChannels
from services.scheduler.service import SchedulerService


@dataclass(frozen=True)
class Control:
    """The control plane's objects, wired to one another in process."""

    scheduler: SchedulerService
    gateway: Gateway
    channel: aio.Channel
    scheduler_mount: Mount


def build_control(
    overrides: Sections,
    predictor: aio.Channel,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
) -> Control:
    """Config → objects; `predictor` leads to its own process. `registry` counts what is not the
    gateway's, which has its own: its series have labels of theirs."""
    config = load(SchedulerConfig, overrides["scheduler"])
    estimator = load(EstimatorConfig, overrides["estimator"])
    server = InProcessServer()
    channel = server.channel()
    advisers = PeerChannels(predictor, channel)
    scheduler = SchedulerService(config, advisers, registry, spans=tracing.service(config.section))
    front = load(GatewayConfig, overrides["gateway"])
    gateway = Gateway(
        front,
        channel,
        connect,
        CollectorRegistry(),
        beside=[Part(registry)],
        spans=tracing.service(front.section),
    )
    scheduler_mount = Mount(
        "foretoken.v1.Scheduler", scheduler_pb2_grpc.add_SchedulerServicer_to_server, scheduler
    )
    for mount in (
        scheduler_mount,
        Mount(
            "foretoken.v1.Estimator",
            estimator_pb2_grpc.add_EstimatorServicer_to_server,
            EstimatorService(estimator, registry),
        ),
    ):
        mount.add(mount.servicer, server)
    return Control(scheduler, gateway, channel, scheduler_mount)
