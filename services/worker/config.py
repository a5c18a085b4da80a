"""Settings of a worker."""

import re
import socket
from collections.abc import Mapping, Set
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from services.runtime.main import ServedSettings
from services.runtime.network.leader_channel import LeaderAddress

MAX_ADAPTER_CHARS = 256  # of a name
KernelSet = Literal["auto", "torch", "numba", "triton"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


class EngineConfig(BaseModel):
    """Settings of an engine. Imports no torch, so that mistakes are reported at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "models/demo"  # a folder or a Hugging Face hub name
    device: str = "auto"  # auto, cpu, cuda or cuda:N
    # auto: the checkpoint's dtype where the device has the instructions for it (bfloat16 on a CPU:
    # AVX512-BF16 or AMX), else float32.
    dtype: DtypeName = "auto"
    # 0: one thread for a tiny model, else the worker's share of the cores.
    torch_threads: int = Field(default=0, ge=0)
    # The worker's number on this machine, from 0; `foretoken serve` sets it. With device auto, each
    # worker takes the GPU of its number, or its share of the cores.
    local_rank: int = Field(default=0, ge=0)
    local_workers: int = Field(default=1, ge=1)
    # Processes of one replica, each with a part of the weights and of the KV heads: one GPU per
    # process, or a share of the cores; `torch_threads` applies to each process.
    tensor_parallel: int = Field(default=1, ge=1, le=64)
    # auto: a forward with fewer calls if the model's layout has one and its results agree with
    # those of transformers at start. off: transformers' forward.
    fused_forward: Literal["auto", "off"] = "auto"
    # int8: the weights of the fused forward's layers in INT8, with one scale per output; inputs are
    # quantized by token. Half the bytes of bfloat16.
    quantization: Literal["none", "int8"] = "none"
    # The fused forward through torch.compile. auto: on a GPU with Triton. on: also on a CPU, which
    # needs a C++ compiler. Used only if its results agree, as `fused_forward`.
    compile: Literal["auto", "on", "off"] = "auto"
    # Compose and launch the next step while the device computes. auto: on CUDA. On a CPU it gains
    # nothing, because a step is computed when it is launched.
    overlap: Literal["auto", "on", "off"] = "auto"
    kv_tokens: int = Field(default=0, ge=0)  # 0: what fits
    block_tokens: int = Field(default=16, ge=1, le=256)
    max_running: int = Field(default=256, ge=1)
    # Tokens of one step: enough to fill the device, few enough for decodes to wait for. 0: 512 on a
    # CPU, 2,048 on a GPU.
    max_batch_tokens: int = Field(default=0, ge=0)
    # Limits prompt and answer together; 0: the model's limit.
    max_context_tokens: int = Field(default=0, ge=0)
    # INT8 KV on the device doubles the tokens that fit, at a small loss of quality.
    kv_dtype: Literal["auto", "int8"] = "auto"
    # KV in host memory: exact, or INT8 with 0.63 of a bfloat16 cache's bytes at 16 tokens per block
    # and 0.56 at 32. On a CPU quantizing costs more than it saves.
    swap_dtype: Literal["native", "int8"] = "native"
    # Host memory for KV of paused requests; unset: up to 4 GiB of what is free; 0: none.
    host_gib: float | None = Field(default=None, ge=0)
    prefix_sharing: bool = True  # requests with a common prefix compute it once
    # Speculative decoding by prompt lookup: at most this many tokens that a step may generate ahead
    # for each request, drafted from earlier text of its own. The answers are the same. 0: none.
    speculative_tokens: int = Field(default=0, ge=0, le=32)
    prompt_lookup_min: int = Field(
        default=3, ge=1, le=64
    )  # tokens before a draft that must occur earlier in the text
    prompt_lookup_max: int = Field(default=8, ge=1, le=64)  # tokens of a longer match that count
    # auto: Triton on CUDA; Numba on a CPU in float32 and bfloat16; else PyTorch.
    kernels: KernelSet = "auto"
    # Decode steps as CUDA graphs by batch size. auto: with Triton kernels on a GPU; on: an error
    # elsewhere; off: eager mode.
    cuda_graphs: Literal["auto", "on", "off"] = "auto"
    # LoRA adapters that requests may use by name: {"name": "folder"}, in PEFT's format. More can be
    # loaded while serving.
    lora_modules: dict[str, str] = Field(default_factory=dict)
    # Adapters held at a time, in host memory. 0: as many as `lora_modules`, and with none, no
    # adapter can be loaded.
    max_adapters: int = Field(default=0, ge=0, le=1024)
    # Of these, adapters on the device at a time, each with memory for `max_lora_rank` in every
    # linear map of the layers. 0: all.
    adapter_slots: int = Field(default=0, ge=0, le=1024)
    # Steps for which an adapter in use keeps its slot while others wait for one.
    adapter_turn_steps: int = Field(default=32, ge=1)
    max_lora_rank: int = Field(default=16, ge=1, le=512)  # of an adapter; more are refused
    # The longest that a request waits until its grammar is compiled here; longer: it fails. The
    # gateway has compiled it within its own limit before.
    grammar_limit_s: float = Field(default=10.0, gt=0)
    gpu_memory_utilization: float = Field(default=0.85, gt=0, le=1)
    report_every_steps: int = Field(default=16, ge=1)
    # Endpoint of ZeroMQ at which changes of the prefix cache are published as vLLM publishes them,
    # for routers: bound if it contains * or begins with ipc://, such as tcp://*:5557, else
    # connected to. Empty: none. A machine's worker N binds the port + N. Needs
    # `foretoken[kv-events]`.
    kv_events_endpoint: str = ""
    kv_events_replay_endpoint: str = ""  # where subscribers ask for earlier events; empty: nowhere
    kv_events_topic: str = ""  # of the messages; llm-d expects kv@ADDRESS@MODEL
    # Events that wait to be sent; further ones are dropped.
    kv_events_queue: int = Field(default=10_000, ge=1)

    @model_validator(mode="after")
    def _looks_up(self) -> Self:
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min {self.prompt_lookup_min} must be at most prompt_lookup_max "
                f"{self.prompt_lookup_max}"
            )
        return self

    @model_validator(mode="after")
    def _holds_adapters(self) -> Self:
        count = len(self.lora_modules)
        if 0 < self.max_adapters < count:
            raise ValueError(f"max_adapters {self.max_adapters} is below the {count} lora_modules")
        if self.adapter_slots > self.most_adapters:
            raise ValueError(
                f"adapter_slots {self.adapter_slots} is above the {self.most_adapters} adapters "
                "that can be held: set max_adapters higher, or leave adapter_slots out"
            )
        return self

    @model_validator(mode="after")
    def _publishes_events(self) -> Self:
        if not self.kv_events_endpoint:
            for key in ("kv_events_replay_endpoint", "kv_events_topic"):
                if getattr(self, key):
                    raise ValueError(f"{key} needs kv_events_endpoint")
        elif not self.prefix_sharing:
            raise ValueError("kv_events_endpoint needs prefix_sharing")
        return self

    @field_validator("kv_events_endpoint", "kv_events_replay_endpoint")
    @classmethod
    def _known_transport(cls, endpoint: str) -> str:
        if endpoint and not re.fullmatch(r"tcp://.+:\d+|ipc://.+", endpoint):
            raise ValueError("Input should be tcp://HOST:PORT, tcp://*:PORT or ipc://PATH")
        return endpoint

    @property
    def most_adapters(self) -> int:
        """Adapters that can be held at a time."""
        return self.max_adapters or len(self.lora_modules)

    @property
    def most_adapters_on_device(self) -> int:
        return self.adapter_slots or self.most_adapters

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", device):
            raise ValueError("Input should be 'auto', 'cpu', 'cuda', or 'cuda:' and a number")
        return device


def find_unused(config: EngineConfig, used: Set[str]) -> list[str]:
    """The given settings of an engine that one with only the settings `used` does not have, in
    alphabetical order."""
    return sorted(config.model_fields_set & (EngineConfig.model_fields.keys() - used))


class WorkerConfig(ServedSettings, EngineConfig):
    """Section `worker`: one model replica, and how it is served."""

    section: ClassVar[str] = "worker"

    worker_id: str = Field(default_factory=socket.gethostname, min_length=1)
    address: str = "127.0.0.1:50061"  # host:port, or unix:/path
    advertise: str = ""  # where gateways reach `address`; empty: the same
    # With a standby: ip:port,ip:port or dns:///name:port.
    scheduler_address: LeaderAddress = "127.0.0.1:50052"
    served_model_name: str = ""  # empty: the folder's or hub name
    # Time to measure steps at start, and as much again for swaps. Half a second suffices for a
    # small model's costs; those of a slow one are also learned while serving.
    profile_s: float = Field(default=0.5, ge=0, le=4.5)
    # Tokens that wait for one gateway; above, its stream is closed and reopened.
    outbox_tokens: int = Field(default=262_144, ge=1)
    outbox_reports: int = Field(default=4_096, ge=1)  # the same for the scheduler
    # Streams at a time, also those that have not said hello yet; further ones are refused.
    max_gateways: int = Field(default=1_024, ge=1)
    hello_wait_s: float = Field(default=30.0, gt=0)  # for the first message of a stream
    # The longest silence towards the scheduler. After one of scheduler.suspect_s this worker is
    # suspected to hang.
    heartbeat_s: float = Field(default=0.5, gt=0)
    # The longest step. During a longer one the worker is silent.
    hang_s: float = Field(default=20.0, gt=0)
    reconnect_s: float = Field(default=2.0, gt=0)  # the longest pause between two attempts
    # Without a scheduler, requests wait this long for adoption. A restarted scheduler is back
    # within seconds; later, requests have been restarted elsewhere.
    orphan_hold_s: float = Field(default=30.0, gt=0)
    exit_when_orphaned: bool = False  # exit when the scheduler is gone for `orphaned_s`
    orphaned_s: float = Field(default=10.0, gt=0)

    @model_validator(mode="after")
    def _names_adapters(self) -> Self:
        for name in self.lora_modules:
            if not 0 < len(name) <= MAX_ADAPTER_CHARS or name != name.strip():
                raise ValueError(
                    f"lora_modules: an adapter's name has 1 to {MAX_ADAPTER_CHARS} characters "
                    "without blanks around them"
                )
        if self.model_name in self.lora_modules:
            raise ValueError(
                f"lora_modules: {self.model_name!r} is the name of the model; give the adapter "
                "another one"
            )
        return self

    @property
    def model_name(self) -> str:
        folder = Path(self.model)
        named = folder.resolve().name if folder.exists() else self.model
        return self.served_model_name or named

    @property
    def metric_labels(self) -> Mapping[str, str]:
        return {"model_name": self.model_name, "worker": self.worker_id}
