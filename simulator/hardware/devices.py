"""GPUs and language models as values, and the tables of known ones."""

from functools import cache
from importlib.resources import files
from typing import Annotated, Literal

from pydantic import Field

from services.policies.preset import require_known
from simulator.hardware.records import Record, RecordT, read_record, read_toml

Dtype = Literal["float32", "float16", "bfloat16", "int8", "int4"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Gib = Annotated[float, Field(ge=0, le=2**20)]  # up to a PiB
Count = Annotated[int, Field(ge=1, le=2**53)]  # exact as a double

BYTES: dict[Dtype, float] = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int4": 0.5}
GIB = 2**30


class Gpu(Record):
    """Peak figures of one GPU: bytes per second in one direction, operations per second."""

    memory_gib: Annotated[Gib, Field(gt=0)]
    bandwidth: Positive
    float32_flops: Positive
    float16_flops: Positive
    int8_flops: Positive
    host_bandwidth: Positive
    link_bandwidth: Positive
    link_latency_s: Annotated[float, Field(ge=0)]
    source: str = ""

    def flops(self, dtype: Dtype) -> float:
        """Peak operations per second on activations of this dtype. INT4 weights are expanded to
        float16 before they are multiplied (Lin et al., AWQ, MLSys 2024, §4)."""
        match dtype:
            case "float32":
                return self.float32_flops
            case "int8":
                return self.int8_flops
            case "float16" | "bfloat16" | "int4":
                return self.float16_flops


class Model(Record):
    """The shape of a decoder-only transformer."""

    parameters: Count
    layers: Count
    hidden: Count
    kv_heads: Count
    head_size: Count
    vocabulary: Count
    context_tokens: Count
    tied_embeddings: bool = False
    source: str = ""

    @property
    def multiplied_parameters(self) -> int:
        """Weights that every token is multiplied by. A separate input embedding is not: one row
        is looked up."""
        return self.parameters - (0 if self.tied_embeddings else self.vocabulary * self.hidden)

    def kv_bytes(self, dtype: Dtype) -> float:
        """Bytes of KV per token: a key and a value in each KV head of each layer."""
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES[dtype]


def find_gpu(name: str) -> Gpu:
    """Raises ValueError with the nearest name for an unknown one."""
    require_known("gpu", name, _gpus())
    return _gpus()[name]


def find_model(name: str) -> Model:
    """Raises ValueError with the nearest name for an unknown one."""
    require_known("model", name, _models())
    return _models()[name]


@cache
def _gpus() -> dict[str, Gpu]:
    return _table(Gpu, "gpus.toml")


@cache
def _models() -> dict[str, Model]:
    return _table(Model, "models.toml")


def _table(kind: type[RecordT], file: str) -> dict[str, RecordT]:
    text = files("simulator.hardware").joinpath("tables", file).read_text(encoding="utf-8")
    return {
        name: read_record(kind, row, f"{file} [{name}]")
        for name, row in read_toml(text, file).items()
    }
