"""Loads the engine that computes, and serves it."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from services.worker.kv_events.publisher import KVEventPublisher


def build(
    config: WorkerConfig,
    registry: CollectorRegistry,
    laps: Laps,
    tracing: Tracing,
    connector: Connector,
) -> Unit:
    """Raises ValueError with a sentence if the model cannot be served."""
    transformers.utils.logging.disable_progress_bar()
    events = _kv_events(config)
    Instruments(registry).reading(
        catalogue.KV_EVENTS_DROPPED, lambda: events.dropped if events else 0
    )
    thread = engine_thread()
    engine = thread.submit(load_engine, config, laps.lap).result()
    about = engine.model.forward_name + _drafts(config, engine) + _adapters(engine)
    adapters = partial(EngineAdapters, engine.adapters)
    _read_adapters(registry, engine.adapters)
    beside: Callable[[], Coroutine[Any, Any, None]] | None = events.run if events else None
    unit = build_unit(
        config, engine, thread, registry, laps, tracing, about, connector, adapters, beside
    )
    if events:
        engine.state.listen(events)  # the measured steps are no news
    return unit


def _kv_events(config: WorkerConfig) -> "KVEventPublisher | None":
    """Raises ValueError with a sentence if events are asked for and cannot be published."""
    if not config.kv_events_endpoint:
        return None
    try:
        from services.worker.kv_events.publisher import KVEventPublisher
    except ImportError as error:
        raise ValueError(
            f"worker.kv_events_endpoint needs pyzmq and msgspec ({error}): "
            "pip install 'foretoken[kv-events]'"
        ) from error
    return KVEventPublisher(config)


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
