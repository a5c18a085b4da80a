"""Loads an engine in one process, or as rank 0 of several."""

from collections.abc import Callable

import torch
from transformers import AutoConfig

from services.worker.config import EngineConfig
from services.worker.engine.ranks import rank_device
from services.worker.engine.step import Engine
from services.worker.machine import select_device
from services.worker.model.dtypes import choose_dtype
from services.worker.model.support import explained_load_errors, require_supported
from services.worker.model.tensor_sharding import NO_PLAN, require_even_heads
from services.worker.model.weights import require_memory
from services.worker.parallel.leader import Leader

# Unsupported with several ranks: followers neither sample tokens nor record or compile steps.
SINGLE_PROCESS_OPTIONS = ("overlap", "cuda_graphs", "compile")


def load_engine(config: EngineConfig, lap: Callable[[str], None] = lambda _: None) -> Engine:
    """Loads the engine; the caller closes its `ranks`. Raises ValueError with a sentence if the
    model cannot be loaded or sharded, or does not fit."""
    if config.tensor_parallel == 1:
        return Engine.load(config, lap)
    requested, config = config.dtype, settled(config)
    ranks = Leader(config, rank_device(config, 0))
    try:
        engine = Engine.load(config, lap, ranks)
        ranks.ready()
        device = engine.model.device
        engine.model.dtype_reason = choose_dtype(config.model, device, requested).reason
    except Exception as error:
        # A collective fails if another rank fails, which has the reason.
        broken = isinstance(error, RuntimeError) or isinstance(error.__cause__, RuntimeError)
        reason = ranks.divergence(error) if broken else error
        ranks.close()
        raise reason from error
    return engine


def settled(config: EngineConfig) -> EngineConfig:
    """Returns the configuration that all ranks share, before any rank starts. Raises ValueError
    with a sentence if it cannot work."""
    size = config.tensor_parallel
    for name in SINGLE_PROCESS_OPTIONS:
        if getattr(config, name) == "on":
            raise ValueError(
                f"{name} is on, but tensor_parallel {size} does not support it: set {name} to auto"
            )
    if config.speculative_tokens:
        raise ValueError(
            f"speculative_tokens {config.speculative_tokens} needs tensor_parallel 1, and it is "
            f"{size}: set speculative_tokens to 0"
        )
    if ":" in config.device:
        raise ValueError(
            f"device {config.device} is one GPU, but tensor_parallel {size} takes {size}: set "
            "device to auto"
        )
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    first = config.local_rank * size
    if config.device != "cpu" and gpus and first + size > gpus:
        raise ValueError(
            f"tensor_parallel {size} takes GPUs {first} to {first + size - 1}, but this machine "
            f"has {gpus}: set tensor_parallel lower, or start fewer workers"
        )
    device = select_device(
        config.device, first
    )  # raises ValueError if cuda is configured and missing
    with explained_load_errors(config.model):
        require_supported(config.model)
        model = AutoConfig.from_pretrained(config.model).get_text_config()
        if not model.base_model_tp_plan:
            raise ValueError(NO_PLAN.format(model.model_type))
        require_even_heads(model, model.base_model_tp_plan, size)
        dtype = choose_dtype(config.model, device, config.dtype).dtype
        if device.type == "cpu":
            require_memory(config.model, device, dtype)
    kind = "auto" if device.type == "cuda" else "cpu"  # each rank uses its own GPU
    off = dict.fromkeys(SINGLE_PROCESS_OPTIONS, "off")
    return config.model_copy(update={**off, "device": kind, "dtype": dtype})
