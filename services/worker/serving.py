"""Loads the engine that computes, and serves it."""

from functools import partial

import transformers
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from services.runtime.main import Unit
from services.runtime.network.connector import Connector
from services.runtime.startup import Laps
from services.worker.adapters import EngineAdapters
from services.worker.config import WorkerConfig
from services.worker.engine.runner import engine_thread
from services.worker.engine.step import Engine
from services.worker.parallel.loading import load_engine
from services.worker.unit import build_unit


def build(
    config: WorkerConfig,
    registry: CollectorRegistry,
    laps: Laps,
    tracing: Tracing,
    connector: Connector,
) -> Unit:
    """Raises ValueError with a sentence if the model cannot be served."""
    transformers.utils.logging.disable_progress_bar()
    thread = engine_thread()
    engine = thread.submit(load_engine, config, laps.lap).result()
    about = engine.model.forward_name + _drafts(config, engine) + _adapters(engine)
    adapters = partial(EngineAdapters, engine)
    return build_unit(config, engine, thread, registry, laps, tracing, about, connector, adapters)


def _adapters(engine: Engine) -> str:
    """The room for adapters, for the log; empty without any."""
    pool = engine.model.adapters
    if not pool.slots:
        return ""
    return (
        f", room for {pool.slots} adapters of rank {pool.rank} ({pool.bytes / 2**20:.0f} MiB), "
        f"{len(pool.held)} loaded"
    )


def _drafts(config: WorkerConfig, engine: Engine) -> str:
    """What drafts change, for the log; empty without any."""
    if not config.speculative_tokens:
        return ""
    on_cuda = engine.model.device.type == "cuda"
    lost = ": no step is launched ahead, and steps with drafts have no CUDA graph" * on_cuda
    return f", drafts of up to {config.speculative_tokens} tokens by prompt lookup{lost}"
