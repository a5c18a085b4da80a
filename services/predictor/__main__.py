"""`python -m services.predictor`: config → objects → serve."""

from functools import partial

from prometheus_client import CollectorRegistry

from protos import predictor_pb2_grpc
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.config import load
from services.runtime.main import Build, Sets, Unit, nothing, run_process
from services.runtime.outcomelog.config import LogConfig
from services.runtime.server import Mount


def prepare(config: PredictorConfig, sets: Sets) -> Build:
    return partial(build, config, load(LogConfig, sets[LogConfig.section]))


def build(config: PredictorConfig, log: LogConfig, registry: CollectorRegistry) -> Unit:
    service = PredictorService(config, registry, log)
    mount = Mount(
        "foretoken.v1.Predictor", predictor_pb2_grpc.add_PredictorServicer_to_server, service
    )
    return Unit([mount], service.run, nothing)


if __name__ == "__main__":
    run_process(PredictorConfig, [LogConfig.section], prepare)
