"""`python -m foretoken.vllm.worker`: config → vLLM's engine → serve."""

import os

from prometheus_client import CollectorRegistry

from foretoken.vllm.worker.config import VllmWorkerConfig, environment
from observability.tracing import OFF, Tracing
from services.runtime.main import Unit, run_service
from services.runtime.network.connector import PLAIN, Connector
from services.runtime.process_limits import cores
from services.runtime.startup import Laps, importing, stage_reporter

# The activity that follows each finished part of the start.
FOLLOWING = {
    "imports": "loading the model in vLLM",
    "model": "measuring steps",
    "profile": "attaching to the scheduler",
}


def build(
    config: VllmWorkerConfig,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
    connector: Connector = PLAIN,
) -> Unit:
    """Loads and profiles the model, then serves it. Raises ValueError if it cannot be served."""
    report_stage = stage_reporter(config.started_by)
    report_stage("importing vLLM")
    laps = Laps(report_stage=report_stage, following=FOLLOWING)
    os.environ.update(environment(config, cores(), os.environ))
    with importing():
        from foretoken.vllm.worker import serving
    laps.lap("imports")
    return serving.build(config, registry, laps, tracing, connector)


if __name__ == "__main__":
    run_service(VllmWorkerConfig, build)
