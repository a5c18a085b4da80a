"""Settings of a worker, with their defaults and reasons."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from services.runtime.main import ServedSettings

KernelSet = Literal["auto", "torch", "numba", "triton"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(BaseModel):
    """What an engine is asked to be. No torch here, so that a mistake in it is told at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "models/demo"  # a folder or a Hugging Face id
    device: str = "auto"  # auto, cpu, cuda, or cuda:1 and so on
    # auto: the checkpoint's dtype where the device has the instructions for it (bfloat16 on a CPU:
    # AVX512-BF16 or AMX), else float32.
    dtype: DtypeName = "auto"
    # 0: one for a tiny model, else its share of the cores.
    torch_threads: int = Field(default=0, ge=0)
    # Its number among the workers of this machine, from 0, which `foretoken serve` tells: of `auto`
    # each takes the GPU of that number, or its share of the cores.
    local_rank: int = Field(default=0, ge=0)
    local_workers: int = Field(default=1, ge=1)
    # Processes that one replica runs over, each with its part of the weights and of the KV heads: a
    # GPU each, or its share of the cores; `torch_threads` is of each.
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    # auto: a forward of fewer calls where the model's layout has one and it is seen at start to
    # give what transformers' gives. off: to compare, or should it ever be in doubt.
    fused_forward: Literal["auto", "off"] = "auto"
    # The fused forward through torch.compile. auto: on a GPU, where Triton is there. on: on a CPU
    # too, which needs a C++ compiler. As `fused_forward`, only where it is seen to give the same.
    compile: Literal["auto", "on", "off"] = "auto"
    # While the device computes a step, the next one is composed and launched. auto: on CUDA; on a
    # CPU there is nothing to win, as a step is computed by the time it is launched.
    overlap: Literal["auto", "on", "off"] = "auto"
    kv_tokens: int = Field(default=0, ge=0)  # 0: what memory allows
    block_tokens: int = Field(default=16, ge=1, le=256)
    max_running: int = Field(default=256, ge=1)
    # One step's tokens: long enough to fill the device, short enough for decodes to wait on; 0: as
    # the device has it, 512 on a CPU and 2,048 on a GPU.
    max_batch_tokens: int = Field(default=0, ge=0)
    # Of prompt and answer together, where it shall be less than the model takes; 0: as it takes.
    max_context_tokens: int = Field(default=0, ge=0)
    # INT8 KV on the device doubles the tokens it holds, at a small loss of quality.
    kv_dtype: Literal["auto", "int8"] = "auto"
    # KV that rests in host memory: bit for bit, or INT8, of a bfloat16 cache 0.63 of its bytes in
    # blocks of 16 tokens and 0.56 in blocks of 32. On a CPU quantizing costs more than it saves.
    swap_dtype: Literal["native", "int8"] = "native"
    # Host memory for KV that waits; unset: up to 4 GiB of what is free; 0: none.
    host_gib: float | None = Field(default=None, ge=0)
    prefix_sharing: bool = True  # requests that begin alike compute that once
    # Triton's on CUDA; on a CPU Numba's in float32 and bfloat16; PyTorch's anywhere else.
    kernels: KernelSet = "auto"
    # Decode steps as CUDA graphs by batch size, each launched at once. auto: where Triton's kernels
    # run on a GPU; on: refused elsewhere; off: to compare, or should it ever be in doubt.
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    report_every_steps: int = Field(default=16, ge=1)

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("Input should be 'auto', 'cpu', 'cuda', or 'cuda:' and a number")
        return device


class WorkerConfig(ServedSettings, EngineConfig):
    """Section `worker`: one model replica, and how it is served."""

    section: ClassVar[str] = "worker"

    worker_id: str = Field(default_factory=socket.gethostname, min_length=1)
    address: str = "127.0.0.1:50061"  # host:port, or unix:/path
    advertise: str = ""  # where gateways reach `address`; empty: it is what they dial
    scheduler_address: str = "127.0.0.1:50052"
    served_model_name: str = ""  # empty: the folder's name, or the id
    # Time given to measuring steps at start, and as much again to swaps: under 10 s in all. In half
    # a second a small model's cost is told as well as in two; a slow one's is learnt as it serves.
    profile_s: float = Field(default=0.5, ge=0, le=4.5)
    # Tokens waiting for one gateway to read; beyond, its stream is cut and it starts anew.
    outbox_tokens: int = Field(default=262_144, ge=1)
    outbox_reports: int = Field(default=4_096, ge=1)  # as above, for the scheduler
    reconnect_s: float = Field(default=2.0, gt=0)  # the longest pause between two attempts
    # Without a scheduler, requests here wait so long to be adopted: one that restarts is back in
    # seconds, and whoever waited longer has long been begun elsewhere.
    orphan_hold_s: float = Field(default=30.0, gt=0)
    exit_when_orphaned: bool = False  # end when the scheduler is gone for `orphaned_s`
    orphaned_s: float = Field(default=10.0, gt=0)

    @property
    def model_name(self) -> str:
        folder = Path(self.model)
        named = folder.resolve().name if folder.exists() else self.model
        return self.served_model_name or named

    @property
    def metric_labels(self) -> Mapping[str, str]:
        return {"model_name": self.model_name, "worker": self.worker_id}
