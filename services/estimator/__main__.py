"""Entry point: `python -m services.estimator`."""

from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from protos.generated import estimator_pb2_grpc
from services.estimator.config import EstimatorConfig
from services.estimator.service import EstimatorService
from services.runtime.main import Unit, no_work, run_service
from services.runtime.network.connector import Connector
from services.runtime.server import Mount


def build(config: EstimatorConfig, registry: CollectorRegistry, _: Tracing, __: Connector) -> Unit:
    service = EstimatorService(config, registry)
    mount = Mount(
        "foretoken.v1.Estimator",
        estimator_pb2_grpc.add_EstimatorServicer_to_server,
        service,
        on_invalid=service.metrics.invalid.count,
    )
    return Unit([mount], no_work, no_work)


if __name__ == "__main__":
    run_service(EstimatorConfig, build)
