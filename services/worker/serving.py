"""Loads the engine that computes, and serves it."""

from functools import partial

import transformers
from prometheus_client import CollectorRegistry

from observability.metrics import worker as catalogue
from observability.metrics.instruments import Instruments
from observability.tracing import Tracing
from services.runtime.main import Unit
from services.runtime.network.connector import Connector
from services.runtime.startup import Laps
from services.worker.adapters import EngineAdapters
from services.worker.config import WorkerConfig
from services.worker.engine.adapter_store import AdapterStore
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
    adapters = partial(EngineAdapters, engine.adapters)
    _read_adapters(registry, engine.adapters)
    return build_unit(config, engine, thread, registry, laps, tracing, about, connector, adapters)


def _adapters(engine: Engine) -> str:
    """The room for adapters, for the log; empty without any."""
    pool, taken = engine.adapters.pool, engine.adapters.bytes_by_memory
    if not pool.most:
        return ""
    return (
        f", room for {pool.most} adapters of rank {pool.rank}, {pool.slots} of them on the device "
        f"({taken['device'] / 2**20:.1f} MiB), {len(pool.held)} loaded "
        f"({taken['host'] / 2**20:.1f} MiB)"
    )


def _read_adapters(registry: CollectorRegistry, store: AdapterStore) -> None:
    """Metrics of an engine's adapters, which are read at each scrape."""
    make, pool = Instruments(registry), store.pool
    make.reading(catalogue.ADAPTERS, lambda: store.counts)
    make.reading(catalogue.ADAPTER_BYTES, lambda: store.bytes_by_memory)
    make.reading(catalogue.ADAPTER_COPIES, lambda: pool.copies)
    make.reading(catalogue.ADAPTER_COPY_S, lambda: pool.copy_s)


def _drafts(config: WorkerConfig, engine: Engine) -> str:
    """What drafts change, for the log; empty without any."""
    if not config.speculative_tokens:
        return ""
    on_cuda = engine.model.device.type == "cuda"
    lost = ": no step is launched ahead, and steps with drafts have no CUDA graph" * on_cuda
    return f", drafts of up to {config.speculative_tokens} tokens by prompt lookup{lost}"
