"""`python -m services.batcher`: config → objects → serve."""

from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from protos.generated import batcher_pb2_grpc
from services.batcher.config import BatcherConfig
from services.batcher.service import BatcherService
from services.runtime.main import Unit, no_work, run_service
from services.runtime.network.connector import Connector
from services.runtime.server import Mount


def build(config: BatcherConfig, registry: CollectorRegistry, _: Tracing, __: Connector) -> Unit:
    service = BatcherService(config, registry)
    mount = Mount(
        "foretoken.v1.Batcher",
        batcher_pb2_grpc.add_BatcherServicer_to_server,
        service,
        on_invalid=service.metrics.invalid.count,
    )
    return Unit([mount], no_work, no_work)


if __name__ == "__main__":
    run_service(BatcherConfig, build)
