"""`python -m services.predictor`: config → objects → serve."""

from prometheus_client import CollectorRegistry

from protos import predictor_pb2_grpc
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.main import Unit, nothing, run_service
from services.runtime.server import Mount


def build(config: PredictorConfig, registry: CollectorRegistry) -> Unit:
    service = PredictorService(config, registry)
    mount = Mount(
        "foretoken.v1.Predictor", predictor_pb2_grpc.add_PredictorServicer_to_server, service
    )
    return Unit([mount], nothing, nothing)


if __name__ == "__main__":
    run_service(PredictorConfig, build)
