"""Settings of an emulated engine: what a step costs, and how long answers are."""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from services.costs import CostModel
from services.runtime.config import ConfigError, Settings
from services.worker.config import EngineConfig, find_unused

Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
# Keys of an engine that an emulated one has, too. `swap_dtype` says whether swapped KV is exact.
USED = frozenset(
    {
        "model",
        "local_rank",
        "local_workers",
        "kv_tokens",
        "block_tokens",
        "max_running",
        "max_batch_tokens",
        "max_context_tokens",
        "swap_dtype",
        "prefix_sharing",
        "report_every_steps",
    }
)


class EmulationConfig(Settings):
    """Section `emulation`: the worker's engine sleeps as long as a device would compute.

    `foretoken serve --emulate NAME` sets the keys up to `frame` from a hardware file of the
    simulator, and the sizes of section `worker`.
    """

    section: ClassVar[str] = "emulation"

    # What is emulated, for the log, the ready line and the fleet; empty: the engine computes.
    hardware: str = ""
    # Seconds of a step: in total, per prefilled token, per decoding sequence, and per token of
    # context that attention reads.
    base_s: Seconds = 0.0
    prefill_token_s: Seconds = 0.0
    decode_seq_s: Seconds = 0.0
    context_token_s: Seconds = 0.0
    # Seconds per KV token on the link to host memory and back, and of the device for both together.
    offload_token_s: Seconds = 0.0
    upload_token_s: Seconds = 0.0
    quantize_token_s: Seconds = 0.0
    host_tokens: int = Field(default=0, ge=0)  # KV of paused requests that fits in host memory
    # The engine has no paged KV: a decode step reads the padding of static batches, too, and
    # requests share no prefixes.
    attends_padding: bool = False
    # File of prompts with the lengths of their answers; empty: all lengths are drawn.
    lengths_file: str = ""
    # What the chat template writes before and after the last user message, to find it in a prompt.
    frame: tuple[str, str] = ("", "")
    # Lognormal lengths of other answers: median, and sigma of the logarithm. The defaults lie
    # between those of ShareGPT (280, 1.15) and LMSYS-Chat-1M (139, 1.44).
    median_tokens: float = Field(default=200.0, ge=1, le=1e6)
    sigma: float = Field(default=1.3, ge=0, le=5)

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if self.hardware and not (self.base_s or self.decode_seq_s or self.context_token_s):
            raise ValueError("base_s, decode_seq_s and context_token_s are all 0")
        return self

    @property
    def cost(self) -> CostModel:
        return CostModel(
            self.base_s,
            self.prefill_token_s,
            self.decode_seq_s,
            self.context_token_s,
            source=self.hardware,
            offload_token_s=self.offload_token_s,
            upload_token_s=self.upload_token_s,
            quantize_token_s=self.quantize_token_s,
        )


def check_engine(config: EngineConfig, emulation: EmulationConfig) -> None:
    """Raises ConfigError for settings of an engine that an emulated one does not have, and for
    missing or contradictory sizes."""
    for key in find_unused(config, USED):
        raise ConfigError(
            f"worker.{key} has no effect on an emulated engine, which has the speed and "
            f"memory of {emulation.hardware}: leave it out"
        )
    if config.kv_tokens < config.block_tokens:
        raise ConfigError(
            "worker.kv_tokens: an emulated engine needs the size of its KV, at least one block of "
            f"{config.block_tokens} tokens (got {config.kv_tokens})"
        )
