"""Builds the control plane of an embedded system: scheduler, estimator and gateway in one process.

The import takes a second, so it happens while the child processes start.
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
class ControlPlane:
    """Scheduler and gateway, connected by in-process channels."""

    scheduler: SchedulerService
    gateway: Gateway
    channel: aio.Channel
    scheduler_mount: Mount


def build_control_plane(
    overrides: Sections,
    predictor: aio.Channel,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
) -> ControlPlane:
    """Builds the objects from their configs. `predictor` is a channel to its process.

    `registry` holds the series of scheduler and estimator. The gateway has its own registry,
    because its series have other labels.
    """
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
        other_parts=[Part(registry)],
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
    return ControlPlane(scheduler, gateway, channel, scheduler_mount)
