"""Settings of a worker with vLLM's engine, and what they are called in vLLM. Imports no vLLM."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, model_validator

from services.worker.config import WorkerConfig, find_unused

# Keys of section `worker` that vLLM's engine has, too. `swap_dtype` is ignored: nothing is swapped.
USED = frozenset(
    {
        "model",
        "device",
        "dtype",
        "torch_threads",
        "local_rank",
        "local_workers",
        "tensor_parallel",
        "kv_tokens",
        "block_tokens",
        "max_running",
        "max_batch_tokens",
        "max_context_tokens",
        "prefix_sharing",
        "gpu_memory_utilization",
        "report_every_steps",
        "swap_dtype",
    }
)
VISIBLE = "CUDA_VISIBLE_DEVICES"
# Values of other keys that mean what vLLM does anyway.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "host_gib": (None, 0.0),
    "quantization": ("none",),
    "kv_dtype": ("auto",),
}
VLLMS_EVENTS = 'set worker.vllm_args={"kv_events_config": {"enable_kv_cache_events": true, …}}'
INSTEAD = {
    "host_gib": "vLLM frees the KV of paused requests",
    "quantization": "vLLM loads quantized checkpoints by itself",
    "kv_dtype": 'vLLM has another INT8 cache: set worker.vllm_args={"kv_cache_dtype": …}',
    "speculative_tokens": 'set worker.vllm_args={"speculative_config": …}',
    "lora_modules": "foretoken does not load vLLM's adapters",
    "max_adapters": "foretoken does not load vLLM's adapters",
    "adapter_slots": "foretoken does not load vLLM's adapters",
    "kv_events_endpoint": VLLMS_EVENTS,
    "kv_events_replay_endpoint": VLLMS_EVENTS,
    "kv_events_topic": VLLMS_EVENTS,
    "kv_events_queue": VLLMS_EVENTS,
    "kernels": 'set worker.vllm_args={"attention_backend": …}',
    "cuda_graphs": 'set worker.vllm_args={"enforce_eager": true} for none',
    "compile": 'set worker.vllm_args={"enforce_eager": true} for none',
    "overlap": 'set worker.vllm_args={"async_scheduling": …}',
}


class VllmWorkerConfig(WorkerConfig):
    """Section `worker` of a worker with vLLM's engine."""

    # Arguments of vLLM's engine by their names in Python, such as {"enforce_eager": true}; they win
    # over those that follow from the other keys.
    vllm_args: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _means_something(self) -> "VllmWorkerConfig":
        neutral = {key for key, values in NEUTRAL.items() if getattr(self, key) in values}
        for key in find_unused(self, USED | neutral):
            instead = f": {INSTEAD[key]}" if key in INSTEAD else ""
            raise ValueError(f"{key} has no effect with vLLM's engine{instead}; leave it out")
        return self


def engine_arguments(config: VllmWorkerConfig) -> dict[str, Any]:
    """vLLM's engine arguments for these settings. The size of the KV cache is set later, when
    vLLM has chosen the size of its blocks."""
    arguments: dict[str, Any] = {
        "model": config.model,
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "max_num_seqs": config.max_running,
        "enable_prefix_caching": config.prefix_sharing,
        "disable_log_stats": True,
        "seed": 0,
    }
    given = config.model_fields_set
    if config.max_batch_tokens:
        arguments["max_num_batched_tokens"] = config.max_batch_tokens
    if config.max_context_tokens:
        arguments["max_model_len"] = config.max_context_tokens
    if "block_tokens" in given:
        arguments["block_size"] = config.block_tokens
    if "gpu_memory_utilization" in given:
        arguments["gpu_memory_utilization"] = config.gpu_memory_utilization
    return arguments | config.vllm_args


def environment(config: VllmWorkerConfig, cores: int, given: Mapping[str, str]) -> dict[str, str]:
    """Variables to set before vLLM is imported; the `given` ones stay. `cores` are those that this
    process may use.

    With several workers on a machine each takes the GPUs of its number among the visible ones, or
    its share of the cores. Raises ValueError if too few are visible.
    """
    variables = {"VLLM_LOGGING_LEVEL": config.log_level, "VLLM_NO_USAGE_STATS": "1"}
    gpus: dict[str, str] = {}
    size = config.tensor_parallel
    kind, _, number = config.device.partition(":")
    if kind != "cpu" and (number or config.local_workers > 1):
        first = int(number) if number else config.local_rank * size
        gpus = _visible_gpus(given.get(VISIBLE, ""), first, size)
    share = max(1, cores // (config.local_workers * size))
    if config.torch_threads or config.local_workers > 1:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        variables["OMP_NUM_THREADS"] = str(config.torch_threads or share)
    return {name: value for name, value in variables.items() if name not in given} | gpus


def _visible_gpus(visible: str, first: int, count: int) -> dict[str, str]:
    """Makes `count` GPUs visible, of those that are visible now, by their position."""
    numbers = visible.split(",") if visible else [str(n) for n in range(first + count)]
    if len(numbers) < first + count:
        raise ValueError(
            f"this worker needs GPU {first + count - 1} of those in {VISIBLE}={visible}, which has "
            f"{len(numbers)}: make more visible, or start fewer workers"
        )
    return {VISIBLE: ",".join(numbers[first : first + count])}
