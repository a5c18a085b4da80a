"""`python -m services.scheduler`: config → objects → serve."""

from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from protos.generated import scheduler_pb2_grpc
from services.runtime.main import Unit, run_service
from services.runtime.network.connector import Connector
from services.runtime.network.identity import Role
from services.runtime.server import Mount
from services.scheduler.config import SchedulerConfig
from services.scheduler.leadership.keeper import open_leadership
from services.scheduler.links.peers import PeerChannels
from services.scheduler.service import SchedulerService


def build(
    config: SchedulerConfig, registry: CollectorRegistry, tracing: Tracing, connector: Connector
) -> Unit:
    connect = connector.connect
    channels = PeerChannels(
        connect(config.predictor_address, Role.PREDICTOR),
        connect(config.estimator_address, Role.ESTIMATOR),
    )
    batcher = connect(config.batcher_address, Role.BATCHER) if config.batcher_address else None
    spans, leadership = tracing.service(config.section), open_leadership(config)
    service = SchedulerService(config, channels, registry, batcher, spans, leadership)
    mount = Mount(
        "foretoken.v1.Scheduler",
        scheduler_pb2_grpc.add_SchedulerServicer_to_server,
        service,
        on_invalid=service.metrics.invalid.count,
    )
    return Unit([mount], service.run, service.hand_over, cycle_free=True, ready=leadership.wait)


if __name__ == "__main__":
    run_service(SchedulerConfig, build)
