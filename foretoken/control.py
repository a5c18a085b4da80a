"""The control plane in this process: scheduler, estimator and gateway, wired to one another.

Imported once the processes of the others have been started: it takes a second, and so do they.
"""

from dataclasses import dataclass

from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken.options import Sections
from gateway.config import GatewayConfig
from gateway.http.app import build_app as build_app
from gateway.http.serve import serving_http as serving_http
from gateway.service import GatewayService
from protos import estimator_pb2_grpc, scheduler_pb2_grpc
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.runtime.channel import InProcessServer, connect
from services.runtime.config import load
from services.runtime.server import Mount
from services.scheduler.advice import Advisers
from services.scheduler.config import SchedulerConfig
from services.scheduler.service import SchedulerService


@dataclass(frozen=True)
class Control:
    """The control plane's objects, wired to one another in process."""

    scheduler: SchedulerService
    gateway: GatewayService
    channel: aio.Channel
    scheduler_mount: Mount


def build_control(
    overrides: Sections, predictor: aio.Channel, registry: CollectorRegistry
) -> Control:
    """Config → objects; `predictor` leads to its own process."""
    config = load(SchedulerConfig, overrides["scheduler"])
    estimator = load(EstimatorConfig, overrides["estimator"])
    server = InProcessServer()
    channel = server.channel()
    scheduler = SchedulerService(config, Advisers(predictor, channel), registry)
    gateway = GatewayService(load(GatewayConfig, overrides["gateway"]), channel, connect, registry)
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
