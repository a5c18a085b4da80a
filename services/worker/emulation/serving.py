"""Builds the emulated engine from its settings, and serves it."""

import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from observability.tracing import Tracing
from services.runtime.main import Unit
from services.runtime.network.connector import Connector
from services.runtime.startup import Laps
from services.worker.config import WorkerConfig
from services.worker.emulation.answers import Answers, LengthLaw
from services.worker.emulation.config import EmulationConfig, check_engine
from services.worker.emulation.engine import EmulatedEngine
from services.worker.emulation.lengths import read_lengths
from services.worker.emulation.vocabulary import Vocabulary
from services.worker.engine.runner import engine_thread
from services.worker.requests.types.limits import Limits
from services.worker.unit import build_unit

# Interpreter switch interval: the engine's thread wakes at the end of a step of some milliseconds,
# while the event loop writes the tokens of the one before.
SWITCH_S = 0.0005
UNBOUNDED_TOKENS = 2**31 - 1
BATCH_TOKENS = 2_048  # of a step if not configured, as on a GPU


def build(
    config: WorkerConfig,
    emulation: EmulationConfig,
    registry: CollectorRegistry,
    laps: Laps,
    tracing: Tracing,
    connector: Connector,
) -> Unit:
    """Raises ValueError with a sentence for settings or files that cannot be used."""
    engine = build_engine(config, emulation)
    laps.lap("tokenizer")
    sys.setswitchinterval(SWITCH_S)
    return build_unit(
        config, engine, engine_thread(), registry, laps, tracing, "no forward", connector
    )


def build_engine(config: WorkerConfig, emulation: EmulationConfig) -> EmulatedEngine:
    """Raises ValueError with a sentence for settings or files that cannot be used."""
    check_engine(config, emulation)
    vocabulary = Vocabulary(config.model, emulation.frame)
    file = emulation.lengths_file
    answers = Answers(
        vocabulary.words,
        min(vocabulary.eos_ids),
        LengthLaw(emulation.median_tokens, emulation.sigma),
        read_lengths(Path(file)) if file else {},
        vocabulary.texts,
    )
    return EmulatedEngine(
        emulation.hardware,
        emulation.cost,
        limits_of(config, emulation, vocabulary.eos_ids),
        answers,
        vocabulary.size,
        emulation.attends_padding,
    )


def limits_of(config: WorkerConfig, emulation: EmulationConfig, eos_ids: frozenset[int]) -> Limits:
    """The limits of the worker's state, as the simulator has them for the same hardware."""
    return Limits(
        kv_blocks=config.kv_tokens // config.block_tokens,
        block_tokens=config.block_tokens,
        max_running=config.max_running,
        max_batch_tokens=config.max_batch_tokens or BATCH_TOKENS,
        max_context_tokens=config.max_context_tokens or UNBOUNDED_TOKENS,
        report_every_steps=config.report_every_steps,
        eos_ids=eos_ids,
        host_blocks=emulation.host_tokens // config.block_tokens,
        exact_swaps=config.swap_dtype == "native",
        prefix_sharing=config.prefix_sharing and not emulation.attends_padding,
    )
