"""Entry point: `python -m services.predictor`."""

import os
import sys
from functools import partial

from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from protos.generated import predictor_pb2_grpc
from services.predictor.config import PredictorConfig
from services.predictor.service import PredictorService
from services.runtime.config import load
from services.runtime.main import Build, Sets, Unit, no_work, run_process
from services.runtime.network.connector import Connector
from services.runtime.outcomelog.config import LogConfig
from services.runtime.server import Mount
from services.runtime.startup import stage_reporter

# Interpreter switch interval: the event loop answers while the prompt-reading thread computes.
SWITCH_S = 0.0005


def prepare(config: PredictorConfig, sets: Sets) -> Build:
    """Lowers the priority of this process, so that token generation has precedence."""
    os.nice(config.nice)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported, with the encoder
    sys.setswitchinterval(SWITCH_S)
    return partial(build, config, load(LogConfig, sets[LogConfig.section]))


def build(
    config: PredictorConfig,
    log: LogConfig,
    registry: CollectorRegistry,
    tracing: Tracing,
    _: Connector,
) -> Unit:
    stage_reporter(config.started_by)("loading the encoder and the learned state")
    service = PredictorService(config, registry, log, spans=tracing.service(config.section))
    mount = Mount(
        "foretoken.v1.Predictor",
        predictor_pb2_grpc.add_PredictorServicer_to_server,
        service,
        on_invalid=service.metrics.invalid.count,
    )
    return Unit([mount], service.run, no_work)


if __name__ == "__main__":
    run_process(PredictorConfig, [LogConfig.section], prepare)
