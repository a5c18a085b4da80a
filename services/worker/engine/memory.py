"""How much KV a machine holds: on the device, and resting in host memory."""

from collections.abc import Sequence

import torch

from services.worker.config import EngineConfig
from services.worker.engine.graphs.sizes import ROW_BLOCKS_MAX
from services.worker.kv import host_cache
from services.worker.kv.cache import bytes_per_token
from services.worker.kv.capacity import KVMemory
from services.worker.machine import batch_tokens_of, free_host_bytes
from services.worker.model.paged import PagedModel

CPU_KV_TOKENS = 65_536  # more than the requests one CPU decodes at a useful pace
FREE_SHARE = 0.25  # of the host memory that is free, where no size is set: the host has other work
HOST_BYTES = 4 * 2**30  # as much rests where no size is set, and memory allows
STAGING_BYTES = {"cuda": 128 * 2**20, "cpu": 16 * 2**20}  # 5 ms of a PCIe 4.0 link; a CPU's caches
DIRECTIONS = 2  # staging goes both ways
# What the driver keeps of a recorded step: some hundred kernels of some KiB, a guess on the safe
# side that was not measured. And partial results of attention, which all steps share.
GRAPH_BYTES = 8 * 2**20
PARTIALS_BYTES = 32 * 2**20


def kv_blocks(model: PagedModel, settings: EngineConfig, graphs_bytes: int = 0) -> int:
    """Blocks to allocate: as configured, or what is free, `graphs_bytes` set aside. Raises
    ValueError if that is too few."""
    token_bytes = bytes_per_token(model.shapes, model.dtype, settings.kv_dtype == "int8")
    memory = kv_memory(model, settings, token_bytes, graphs_bytes)
    tokens = settings.kv_tokens or _default_tokens(model, memory.tokens)
    if tokens > memory.tokens:
        raise ValueError(
            f"kv_tokens {tokens} need {tokens * token_bytes / 2**20:.0f} MiB of KV cache "
            f"({token_bytes} bytes a token), but only {memory.available_bytes / 2**20:.0f} MiB are "
            f"free; {memory.tokens} tokens fit"
        )
    if tokens < settings.block_tokens:
        raise ValueError(
            f"a KV cache of {tokens} tokens holds not even one block of {settings.block_tokens}"
        )
    return tokens // settings.block_tokens


def host_blocks(
    settings: EngineConfig, record_bytes: int, kv_bytes: int = 0, most_blocks: int | None = None
) -> int:
    """Blocks of `record_bytes` that may rest in host memory; `most_blocks` where no size is set.
    Of several ranks, this one's part of each.

    `kv_bytes` of it are promised already: a CPU's own KV cache, which takes what it is given
    only once it is written. Raises ValueError where the pool set is larger than what is free.
    """
    free_bytes = _free_host_bytes(settings) - kv_bytes
    if settings.host_gib is None:
        most_bytes = min(int(free_bytes * FREE_SHARE), HOST_BYTES // settings.tensor_parallel)
        fitting = most_bytes // record_bytes
        return max(0, fitting if most_blocks is None else min(fitting, most_blocks))
    try:
        set_bytes = int(settings.host_gib * 2**30) // settings.tensor_parallel
        return host_cache.host_blocks(set_bytes, record_bytes, free_bytes)
    except host_cache.HostMemoryError as error:
        raise ValueError(f"host_gib {settings.host_gib:g}: {error}") from error


def _free_host_bytes(settings: EngineConfig) -> int:
    """This rank's share: all of them ask before any takes it."""
    return free_host_bytes() // settings.tensor_parallel


def staging_bytes(device: torch.device) -> int:
    """Of one direction's staging ring."""
    return STAGING_BYTES[device.type]


def _default_tokens(model: PagedModel, fitting: int) -> int:
    if model.device.type == "cpu":
        return min(CPU_KV_TOKENS, int(fitting * FREE_SHARE))
    return fitting


def kv_memory(
    model: PagedModel, settings: EngineConfig, token_bytes: int, graphs_bytes: int = 0
) -> KVMemory:
    """Of the device as it is now, the model loaded. On a GPU the engine's part is measured."""
    if model.device.type == "cpu":  # what is free is without the model, and steps need little
        return KVMemory(_free_host_bytes(settings), 0, 0, token_bytes)
    free, total = torch.cuda.mem_get_info(model.device)
    staging = DIRECTIONS * staging_bytes(model.device)
    return KVMemory(
        capacity_bytes=int(total * settings.gpu_memory_utilization),
        model_bytes=total - free,
        engine_bytes=staging + _peak_bytes(model, settings) + graphs_bytes,
        token_bytes=token_bytes,
    )


def graphs_bytes(model: PagedModel, sizes: Sequence[int]) -> int:
    """What decode steps take that are recorded for so many rows each: what the largest computes in,
    its inputs and logits, and what the driver keeps of every one. On a CPU it is little."""
    if model.device.type == "cpu" or not sizes:
        return 0
    rows = max(sizes)
    row_bytes = model.vocab_size * model.dtype.itemsize + 4 * ROW_BLOCKS_MAX
    shared = _forward_bytes(model, rows) + rows * row_bytes + PARTIALS_BYTES
    return shared + len(sizes) * GRAPH_BYTES


def _peak_bytes(model: PagedModel, settings: EngineConfig) -> int:
    """What a full batch needs beside the cache."""
    return _forward_bytes(model, batch_tokens_of(settings.max_batch_tokens, model.device))


def _forward_bytes(model: PagedModel, tokens: int) -> int:
    """Measured on one forward of so many tokens, their logits too."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.forward_alone(min(tokens, model.max_context_tokens))
    return torch.cuda.max_memory_allocated(model.device) - before
