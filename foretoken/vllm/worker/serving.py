"""Loads vLLM's engine, and serves it."""

import vllm
from prometheus_client import CollectorRegistry
from vllm.platforms import current_platform

from foretoken.vllm.schedulers import require_tested
from foretoken.vllm.settings import load_settings
from foretoken.vllm.worker.config import VllmWorkerConfig
from foretoken.vllm.worker.core import VllmCore
from foretoken.vllm.worker.engine import VllmEngine
from observability.tracing import Tracing
from services.core import Grant, Plan
from services.runtime.main import Unit
from services.runtime.network.connector import Connector
from services.runtime.startup import Laps
from services.worker.engine.runner import engine_thread
from services.worker.requests.types.prompt import Prompt, SamplingParams
from services.worker.unit import build_unit

WARM_UP = SamplingParams(
    temperature=1.0, top_k=2, top_p=0.9, repetition_penalty=1.1, logprobs=1, ignore_eos=True
)


def build(
    config: VllmWorkerConfig,
    registry: CollectorRegistry,
    laps: Laps,
    tracing: Tracing,
    connector: Connector,
) -> Unit:
    """Raises ValueError with a sentence if vLLM cannot serve the model."""
    thread = engine_thread()
    engine = thread.submit(load_engine, config).result()
    laps.lap("model")
    about = f"vLLM {vllm.__version__}"
    return build_unit(config, engine, thread, registry, laps, tracing, about, connector)


def load_engine(config: VllmWorkerConfig) -> VllmEngine:
    """In the thread that steps it. Raises ValueError for an untested version of vLLM, unless the
    settings of section `vllm` allow it."""
    require_tested(vllm.__version__, load_settings())
    asked = config.device.partition(":")[0]
    if asked not in ("auto", kind := current_platform.device_type):
        raise ValueError(
            f"worker.device={config.device}, but this vLLM computes on {kind}: leave it out, or "
            "install foretoken in the environment of another build of vLLM"
        )
    lost: list[VllmEngine] = []  # the engine, once it exists

    def on_lost() -> None:
        for engine in lost:
            engine.on_lost()

    core = VllmCore(config, on_lost)
    engine = VllmEngine(core, config.report_every_steps, _placement(core))
    lost.append(engine)
    _warm_up(engine)
    return engine


def _warm_up(engine: VllmEngine) -> None:
    """Draws two tokens with what vLLM compiles at its first use, which may take half a minute."""
    prompt = Prompt("warm-up", (0,), 1, 2, WARM_UP)
    engine.add(prompt, 0.0)
    engine.state.apply_plan(Plan(1, admit=(Grant(prompt.request_id, prompt.max_tokens),)), 0.0)
    while engine.step():
        pass
    engine.reset()


def _placement(core: VllmCore) -> str:
    model, parallel = core.config.model_config, core.config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    device = core.config.device_config.device_type
    ranks = f" x {parallel.world_size}" if parallel.world_size > 1 else ""
    return f"{dtype} on {device}{ranks} (vLLM {vllm.__version__})"
