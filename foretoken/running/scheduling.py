"""`python -m foretoken.running.scheduling`: the scheduler, with the estimator in its process."""

from dataclasses import dataclass

from grpc import aio
from prometheus_client import CollectorRegistry

from foretoken.running.options import Sections
from observability.tracing import OFF, Tracing
from protos.generated import estimator_pb2_grpc, scheduler_pb2_grpc
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.runtime.config import load
from services.runtime.main import Build, Sets, Unit, run_process
from services.runtime.network.channel import InProcessServer
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Role
from services.runtime.server import Mount
from services.scheduler.config import SchedulerConfig
from services.scheduler.links.peers import PeerChannels
from services.scheduler.service import SchedulerService


@dataclass(frozen=True)
class Scheduling:
    """A scheduler and the estimator that it calls in process. `channel` reaches both."""

    scheduler: SchedulerService
    channel: aio.Channel
    mount: Mount  # of the scheduler, for a server


def build_scheduling(
    overrides: Sections,
    predictor: aio.Channel,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
) -> Scheduling:
    """Builds both from their config sections. `registry` receives the series of both."""
    config = load(SchedulerConfig, overrides["scheduler"])
    estimator = load(EstimatorConfig, overrides["estimator"])
    server = InProcessServer()
    channel = server.channel()
    spans = tracing.service(config.section)
    scheduler = SchedulerService(config, PeerChannels(predictor, channel), registry, spans=spans)
    mount = Mount(
        "foretoken.v1.Scheduler",
        scheduler_pb2_grpc.add_SchedulerServicer_to_server,
        scheduler,
        on_invalid=scheduler.metrics.invalid.count,
    )
    advice = Mount(
        "foretoken.v1.Estimator",
        estimator_pb2_grpc.add_EstimatorServicer_to_server,
        EstimatorService(estimator, registry),
    )
    for each in (mount, advice):
        each.add(each.servicer, server)
    return Scheduling(scheduler, channel, mount)


def _prepare(config: SchedulerConfig, sets: Sets) -> Build:
    overrides = {name: dict(settings) for name, settings in sets.items()}

    def build(registry: CollectorRegistry, tracing: Tracing, connector: Connector) -> Unit:
        predictor = connector.connect(config.predictor_address, Role.PREDICTOR)
        scheduling = build_scheduling(overrides, predictor, registry, tracing)
        scheduler = scheduling.scheduler
        return Unit([scheduling.mount], scheduler.run, scheduler.hand_over, cycle_free=True)

    return build


if __name__ == "__main__":
    run_process(SchedulerConfig, [EstimatorConfig.section], _prepare)
