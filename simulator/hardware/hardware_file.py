"""Hardware files: TOML with measured costs or a roofline, memory, engine limits and a price."""

import json
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from services.costs import CostModel
from services.policies.preset import require_known
from simulator.hardware.devices import Count, Gib
from simulator.hardware.hardware import Hardware, check_blocks
from simulator.hardware.records import Record, read_record, read_text, read_toml
from simulator.hardware.roofline import (
    Roofline,
    derive_cost,
    derive_host_tokens,
    derive_kv_tokens,
)

SUFFIX = ".toml"
DEFAULT_CONTEXT_TOKENS = 2**20  # no limit but memory
DEFAULT_UTILIZATION = 0.9  # of a GPU's memory; vLLM's default
DEFAULT_WORKSPACE_GIB = 1.0  # activations of a step, CUDA context and graphs
# The keys of [memory] from which a roofline derives a capacity, by that of the capacity itself.
DERIVED_FROM = {"kv_tokens": {"utilization", "workspace_gib"}, "host_tokens": {"host_gib"}}
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class CostTable(Record):
    """Measured costs; see `CostModel`. A decode step must take time: `base_s`, `decode_seq_s` and
    `context_token_s` are not all 0."""

    base_s: Seconds
    prefill_token_s: Seconds
    decode_seq_s: Seconds
    context_token_s: Seconds
    offload_token_s: Seconds = 0.0
    upload_token_s: Seconds = 0.0
    quantize_token_s: Seconds = 0.0
    error_p50: Seconds = 0.0
    error_p90: Seconds = 0.0
    samples: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if not (self.base_s or self.decode_seq_s or self.context_token_s):
            raise ValueError("base_s, decode_seq_s and context_token_s are all 0")
        return self


class MemoryTable(Record):
    """KV capacities in tokens. With a roofline they can be derived instead: `kv_tokens` from the
    share of device memory that the engine uses and its workspace, `host_tokens` from `host_gib`."""

    kv_tokens: Annotated[int, Field(ge=1)] | None = None
    host_tokens: Annotated[int, Field(ge=0)] | None = None
    utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    workspace_gib: Gib | None = None
    host_gib: Gib | None = None


class EngineTable(Record):
    """The engine's limits. `max_context_tokens` defaults to the model's with a roofline. An engine
    that `attends_padding` reads the KV of a static batch's padding in each decode step."""

    block_tokens: Annotated[int, Field(ge=1, le=256)] = 16
    max_running: Count = 256
    max_batch_tokens: Count = 2_048
    max_context_tokens: Count | None = None
    report_every_steps: Count = 16
    attends_padding: bool = False


class PriceTable(Record):
    usd_per_hour: Seconds = 0.0


class HardwareFile(Record):
    """One hardware file. `about` says what the worker is, `source` where its numbers come from."""

    about: str = ""
    source: str = ""
    cost: CostTable | None = None
    roofline: Roofline | None = None
    memory: MemoryTable = MemoryTable()
    engine: EngineTable = EngineTable()
    price: PriceTable = PriceTable()

    @model_validator(mode="after")
    def _has_one_kind(self) -> Self:
        if (self.cost is None) == (self.roofline is None):
            raise ValueError("give either [cost] or [roofline]")
        given = self.memory.model_fields_set
        for capacity, keys in DERIVED_FROM.items():
            if not (unused := keys & given):
                continue
            if self.cost is not None:
                raise ValueError(f"memory.{min(unused)} needs [roofline]; give memory.{capacity}")
            if capacity in given:
                raise ValueError(
                    f"memory.{min(unused)} has no effect beside memory.{capacity}; give one of them"
                )
        if self.cost is None:
            return self
        if self.memory.kv_tokens is None:
            raise ValueError("memory.kv_tokens is missing; only [roofline] can derive it")
        return self


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The hardware of a shipped profile's name or of a TOML file.

    A path has a `.toml` suffix or a folder in it. Raises ValueError, which names the nearest
    profile, or the file, the key and its value.
    """
    given = str(name_or_path)
    if given.endswith(SUFFIX) or Path(given).name != given:
        path = Path(given)
        return read_hardware(read_text(path), path.stem, str(path))
    require_known("hardware", given, (*list_hardware(), f"a {SUFFIX} file"))
    file = _profiles()[given]
    return read_hardware(file.read_text(encoding="utf-8"), given, f"{given}{SUFFIX}")


def list_hardware() -> list[str]:
    """The names of the shipped profiles, sorted."""
    return sorted(_profiles())


def read_hardware(text: str, name: str, where: str) -> Hardware:
    """The hardware that a file's text describes. Raises ValueError, which names `where`, the key
    and its value."""
    file = read_record(HardwareFile, read_toml(text, where), where)
    try:
        return _build(name, file)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def write_hardware(hardware: Hardware) -> str:
    """The file of a hardware value with its costs in seconds; `read_hardware` returns an equal
    one, but for the cost model's version and neighbours."""
    return "\n".join(_lines(hardware)) + "\n"


def _build(name: str, file: HardwareFile) -> Hardware:
    memory, engine, roofline = file.memory, file.engine, file.roofline
    if roofline is None:
        assert file.cost is not None
        cost = CostModel(**file.cost.model_dump(), source=file.source or "file")
        kv_tokens, host_tokens = memory.kv_tokens or 0, memory.host_tokens or 0
        longest = engine.max_context_tokens or DEFAULT_CONTEXT_TOKENS
    else:
        cost = derive_cost(roofline)
        kv_tokens = memory.kv_tokens or _derive_kv_tokens(roofline, memory)
        host_tokens = memory.host_tokens or derive_host_tokens(roofline, memory.host_gib or 0.0)
        longest = engine.max_context_tokens or roofline.of_model.context_tokens
    if kv_tokens < engine.block_tokens:
        raise ValueError(
            f"memory.kv_tokens is {kv_tokens}, less than one block of {engine.block_tokens} tokens"
        )
    check_blocks("memory.kv_tokens", kv_tokens, engine.block_tokens)
    check_blocks("memory.host_tokens", host_tokens, engine.block_tokens)
    return Hardware(
        name,
        cost,
        kv_tokens,
        host_tokens,
        engine.block_tokens,
        engine.max_running,
        engine.max_batch_tokens,
        longest,
        engine.report_every_steps,
        engine.attends_padding,
        file.price.usd_per_hour,
        file.source,
        file.about,
    )


def _derive_kv_tokens(roofline: Roofline, memory: MemoryTable) -> int:
    utilization = DEFAULT_UTILIZATION if memory.utilization is None else memory.utilization
    workspace = DEFAULT_WORKSPACE_GIB if memory.workspace_gib is None else memory.workspace_gib
    return derive_kv_tokens(roofline, utilization, workspace)


def _profiles() -> dict[str, Traversable]:
    folder = files("simulator.hardware").joinpath("profiles")
    return {
        file.name.removesuffix(SUFFIX): file
        for file in folder.iterdir()
        if file.name.endswith(SUFFIX)
    }


def _lines(hardware: Hardware) -> Iterator[str]:
    cost = hardware.cost
    yield f"about = {_quote(hardware.about)}"
    yield f"source = {_quote(hardware.source)}"
    yield ""
    yield "[cost]"
    for key in CostTable.model_fields:
        yield f"{key} = {_number(getattr(cost, key))}"
    yield ""
    yield "[memory]"
    yield f"kv_tokens = {hardware.kv_tokens}"
    yield f"host_tokens = {hardware.host_tokens}"
    yield ""
    yield "[engine]"
    for key in EngineTable.model_fields:
        yield f"{key} = {str(getattr(hardware, key)).lower()}"
    if hardware.usd_per_hour:
        yield ""
        yield "[price]"
        yield f"usd_per_hour = {_number(hardware.usd_per_hour)}"


def _number(value: float) -> str:
    """The shortest decimal that reads back as the same value."""
    return repr(value)


def _quote(text: str) -> str:
    """A TOML basic string. JSON's escapes are a subset of TOML's, but for the delete character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
