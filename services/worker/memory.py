"""How much KV a machine holds."""

import os
from pathlib import Path
from typing import Protocol

import torch

from services.worker.cache import bytes_per_token
from services.worker.model import PagedModel

CPU_KV_TOKENS = 65_536  # more than the requests one CPU decodes at a useful pace
CPU_SHARE = 0.25  # of the memory that is free: the host has other work


class KVSettings(Protocol):
    @property
    def kv_tokens(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def max_batch_tokens(self) -> int: ...
    @property
    def gpu_memory_utilization(self) -> float: ...


def kv_blocks(model: PagedModel, settings: KVSettings) -> int:
    """Blocks to allocate: as configured, or what is free. Raises ValueError if that is too few."""
    token_bytes = bytes_per_token(model.shapes, model.dtype)
    free_bytes = _free_bytes(model, settings)
    tokens = settings.kv_tokens or _default_tokens(model, free_bytes // token_bytes)
    if tokens * token_bytes > free_bytes:
        raise ValueError(
            f"kv_tokens {tokens} need {tokens * token_bytes / 2**20:.0f} MiB of KV cache "
            f"({token_bytes} bytes a token), but only {free_bytes / 2**20:.0f} MiB are free; "
            f"{free_bytes // token_bytes} tokens fit"
        )
    if tokens < settings.block_tokens:
        raise ValueError(
            f"a KV cache of {tokens} tokens holds not even one block of {settings.block_tokens}"
        )
    return tokens // settings.block_tokens


def _default_tokens(model: PagedModel, fitting: int) -> int:
    if model.device.type == "cpu":
        return min(CPU_KV_TOKENS, int(fitting * CPU_SHARE))
    return fitting


def _free_bytes(model: PagedModel, settings: KVSettings) -> int:
    if model.device.type == "cpu":
        return _free_host_bytes()
    free, total = torch.cuda.mem_get_info(model.device)
    return int(free - total * (1 - settings.gpu_memory_utilization)) - _peak_bytes(model, settings)


def _free_host_bytes() -> int:
    """What processes may still take, file caches given up."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _peak_bytes(model: PagedModel, settings: KVSettings) -> int:
    """What a full batch needs beside the cache: measured on one forward of it."""
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    model.forward_alone(min(settings.max_batch_tokens, model.max_context_tokens))
    return torch.cuda.max_memory_allocated(model.device) - before
