"""`python -m services.worker`: config → objects → serve."""

from functools import partial
from pathlib import Path

from prometheus_client import CollectorRegistry

from observability.tracing import OFF, Tracing
from services.runtime.config import load
from services.runtime.main import Build, Sets, Unit, run_process
from services.runtime.network.connector import PLAIN, Connector
from services.runtime.startup import Laps, importing, stage_reporter
from services.worker.compiled_code import set_numba_cache_folder
from services.worker.config import WorkerConfig
from services.worker.emulation.config import EmulationConfig

# The activity that follows each finished part of the start.
FOLLOWING = {
    "model": "making the cache and kernels",
    "compiling": "making the cache and kernels",
    "kernels": "measuring steps",
    "tokenizer": "measuring steps",
    "profile": "attaching to the scheduler",
}


def prepare(config: WorkerConfig, sets: Sets) -> Build:
    """Chooses the engine, once: one that computes, or an emulated one."""
    emulation = load(EmulationConfig, sets[EmulationConfig.section])
    if emulation.hardware:
        return partial(build_emulated, config, emulation)
    return partial(build, config)


def build(
    config: WorkerConfig,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
    connector: Connector = PLAIN,
) -> Unit:
    """Loads and profiles the model, then serves it. Raises ValueError if it cannot be served.

    PyTorch and transformers are imported here, after the configuration has been validated.
    """
    report_stage = stage_reporter(config.started_by)
    report_stage("importing PyTorch")
    following = FOLLOWING | {"imports": f"loading weights{_megabytes(config.model)}"}
    laps = Laps(report_stage=report_stage, following=following)
    set_numba_cache_folder()
    with importing():
        from services.worker import serving
    laps.lap("imports")
    return serving.build(config, registry, laps, tracing, connector)


def build_emulated(
    config: WorkerConfig,
    emulation: EmulationConfig,
    registry: CollectorRegistry,
    tracing: Tracing = OFF,
    connector: Connector = PLAIN,
) -> Unit:
    """Serves an engine that sleeps, without PyTorch. Raises ValueError for wrong settings."""
    report_stage = stage_reporter(config.started_by)
    report_stage(f"emulating {emulation.hardware}")
    laps = Laps(report_stage=report_stage, following=FOLLOWING)
    from services.worker.emulation import serving

    laps.lap("imports")
    return serving.build(config, emulation, registry, laps, tracing, connector)


def _megabytes(model: str) -> str:
    """The size of the weights for the log; empty if the model is no folder."""
    size = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    return f", {size / 1e6:.1f} MB" if size else ""


if __name__ == "__main__":
    run_process(WorkerConfig, [EmulationConfig.section], prepare)
