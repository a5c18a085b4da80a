"""`python -m services.worker.backend`: a worker in front of an OpenAI-compatible server."""

import logging
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from prometheus_client import CollectorRegistry

from observability.metrics import worker as catalogue
from observability.metrics.instruments import Instruments
from observability.tracing import OFF, Tracing
from services.runtime.config import load
from services.runtime.main import Build, Sets, Unit, run_process
from services.runtime.network.connector import PLAIN, Connector
from services.runtime.startup import stage_reporter
from services.worker.backend.availability import Availability
from services.worker.backend.body import BackendBody
from services.worker.backend.capacity import Capacity, limits_of
from services.worker.backend.config import BackendConfig, check_settings
from services.worker.backend.requests import BackendRequests
from services.worker.config import WorkerConfig
from services.worker.engine.runner import EngineRunner
from services.worker.folder import load_tokenizer, read_eos_ids
from services.worker.unit import serve_runner

# Interpreter switch interval: the thread that reads answers and the one that writes tokens to
# gateways take turns within a millisecond.
SWITCH_S = 0.0005


def prepare(config: WorkerConfig, sets: Sets) -> Build:
    """Checks the settings. Raises ConfigError."""
    backend = load(BackendConfig, sets[BackendConfig.section])
    check_settings(config, backend)
    return partial(build, config, backend)


def build(
    config: WorkerConfig,
    backend: BackendConfig,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
    connector: Connector = PLAIN,
) -> Unit:
    """Serves a server's requests; the worker attaches once the server answers. Raises ValueError
    with a sentence for a model's folder that cannot be read."""
    stage_reporter(config.started_by)(f"waiting for {backend.urls[config.local_rank]}")
    tokenizer, eos_ids = load_tokenizer(config.model), read_eos_ids(config.model)
    tokenizer.no_truncation()
    requests = BackendRequests(limits_of(config, Capacity(), eos_ids))
    availability = Availability(config)
    make_body = partial(BackendBody, config, backend, tokenizer, requests, availability)
    runner = EngineRunner(make_body, ThreadPoolExecutor(1, "backend"))
    _read_metrics(Instruments(registry), requests)
    sys.setswitchinterval(SWITCH_S)
    logging.getLogger("httpx2").setLevel(logging.WARNING)  # else a line for each request
    return serve_runner(
        config,
        runner,
        availability.hello,
        registry,
        tracing,
        connector,
        check=lambda: None,  # the server's health decides whether the worker is attached
        close=lambda: None,
        attach=availability.attach,
    )


def _read_metrics(make: Instruments, requests: BackendRequests) -> None:
    """The metrics of a worker that do not depend on steps."""

    def blocks() -> Mapping[str, float]:
        blocks = requests.limits.kv_blocks
        held = min(blocks, requests.used_blocks)
        return {"held": held, "free": blocks - held}

    make.reading(catalogue.RUNNING, lambda: len(requests.running))
    make.reading(catalogue.USAGE, lambda: blocks()["held"] / requests.limits.kv_blocks)
    make.reading(catalogue.BLOCKS, blocks)
    make.reading(catalogue.BLOCK_TOKENS, lambda: requests.limits.block_tokens)


if __name__ == "__main__":
    run_process(WorkerConfig, [BackendConfig.section], prepare)
