"""What an engine is asked to be. No torch here, so that a mistake in it is told at once."""

from dataclasses import dataclass
from typing import Literal

KernelSet = Literal["auto", "torch", "numba", "triton"]


@dataclass(frozen=True)
class EngineConfig:
    """`kv_tokens` 0: what memory allows. `device` auto: CUDA where there is one. `host_gib` None:
    some of the host memory that is free, 0: none."""

    model: str
    kv_tokens: int = 0
    block_tokens: int = 16
    max_running: int = 256
    max_batch_tokens: int = 512
    max_context_tokens: int = 0  # 0: as many as the model takes
    report_every_steps: int = 16
    device: str = "auto"
    dtype: str = "auto"
    gpu_memory_utilization: float = 0.85
    kv_dtype: Literal["auto", "int8"] = "auto"
    swap_dtype: Literal["native", "int8"] = "native"
    host_gib: float | None = None
    prefix_sharing: bool = True
    kernels: KernelSet = "auto"
    torch_threads: int = 0  # 0: one for a tiny model on a CPU, else its share of the cores
    local_rank: int = 0
    local_workers: int = 1
    fused_forward: Literal["auto", "off"] = "auto"
