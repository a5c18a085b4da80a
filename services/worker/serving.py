"""Loads the engine that computes, and serves it."""

import transformers
from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from services.runtime.main import Unit
from services.runtime.startup import Laps
from services.worker.config import WorkerConfig
from services.worker.parallel.loading import load_engine
from services.worker.unit import build_unit


def build(config: WorkerConfig, registry: CollectorRegistry, laps: Laps, tracing: Tracing) -> Unit:
    """Raises ValueError with a sentence if the model cannot be served."""
    transformers.utils.logging.disable_progress_bar()
    engine = load_engine(config, laps.lap)
    return build_unit(config, engine, registry, laps, tracing, engine.model.forward_name)
