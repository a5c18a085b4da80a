"""Builds the control plane of an embedded system: scheduler, estimator and gateway in one process.

The import takes a second, so it happens while the child processes start.
"""

from dataclasses import dataclass
from functools import partial

from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken.running.options import Sections
from foretoken.running.scheduling import build_scheduling
from gateway.config import GatewayConfig
from gateway.front import Front
from observability.exposition import Part
from observability.tracing import OFF, Tracing
from services.runtime.config import load
from services.runtime.network.connector import PLAIN, Connector
from services.runtime.network.identity import Role
from services.runtime.server import Mount
from services.scheduler.service import SchedulerService


@dataclass(frozen=True)
class ControlPlane:
    """Scheduler and gateway, connected by in-process channels."""

    scheduler: SchedulerService
    front: Front
    channel: aio.Channel
    scheduler_mount: Mount


def build_control_plane(
    overrides: Sections,
    predictor: aio.Channel,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
    connector: Connector = PLAIN,
) -> ControlPlane:
    """Builds the objects from their configs. `predictor` is a channel to its process.

    `registry` holds the series of scheduler and estimator. The gateway has its own registry,
    because its series have other labels.
    """
    scheduling = build_scheduling(overrides, predictor, registry, tracing)
    config = load(GatewayConfig, overrides["gateway"])
    front = Front(
        config,
        lambda _: scheduling.channel,
        partial(connector.connect, role=Role.WORKER),
        connector.connect_to_peer,
        other_parts=[Part(registry)],
        spans=tracing.service(config.section),
    )
    return ControlPlane(scheduling.scheduler, front, scheduling.channel, scheduling.mount)
