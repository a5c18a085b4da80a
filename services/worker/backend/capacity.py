"""What a server says about its capacity, and how many requests it gets at a time. Pure."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from math import isfinite
from typing import Any

from services.worker.config import WorkerConfig
from services.worker.requests.types.limits import Limits

UNBOUNDED_TOKENS = 2**31 - 1
SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)")
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
GROWTH = 8  # a full window grows by an eighth of itself
CALM_READINGS = 8  # without growth after a refusal

WAITING = (
    "vllm:num_requests_waiting",
    "sglang:num_queue_reqs",
    "tgi_queue_size",
    "llamacpp:requests_deferred",
)
CACHE = ("vllm:cache_config_info", "sglang:max_total_num_tokens")

READ = (*WAITING, *CACHE)

Sample = tuple[str, Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Capacity:
    """Sizes of a server; 0 where it does not tell."""

    kv_tokens: int = 0
    block_tokens: int = 0
    max_running: int = 0
    max_context_tokens: int = 0

    def __or__(self, other: "Capacity") -> "Capacity":
        """These sizes, and the other's where they are 0."""
        missing = {
            f.name: getattr(other, f.name) for f in fields(self) if not getattr(self, f.name)
        }
        return replace(self, **missing)


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a server is: requests of all its clients that wait in its own queue, None where it
    does not tell."""

    waiting: int | None = None


def limits_of(config: WorkerConfig, told: Capacity, eos_ids: frozenset[int]) -> Limits:
    """The limits of a server: given settings, else what it tells, else the settings' defaults. One
    that tells no memory is not limited by it, but by what it refuses (`Window`)."""
    given = {name: getattr(config, name) for name in config.model_fields_set}
    known = Capacity(
        config.kv_tokens,
        given.get("block_tokens", 0),
        given.get("max_running", 0),
        config.max_context_tokens,
    )
    sizes = known | told | Capacity(0, config.block_tokens, config.max_running, UNBOUNDED_TOKENS)
    enough = min(UNBOUNDED_TOKENS, sizes.max_running * sizes.max_context_tokens)
    return Limits(
        kv_blocks=(sizes.kv_tokens or enough) // sizes.block_tokens,
        block_tokens=sizes.block_tokens,
        max_running=sizes.max_running,
        max_batch_tokens=0,
        max_context_tokens=sizes.max_context_tokens,
        report_every_steps=0,
        eos_ids=eos_ids,
        grammars=True,  # as far as the server has them: constraints.py
    )


def parse_metrics(text: str) -> Iterator[Sample]:
    """Name, labels and value of the samples of a Prometheus text that are read here, and finite."""
    for line in text.splitlines():
        if line.startswith(READ) and (found := SAMPLE.match(line)):
            name, labels, value = found.groups()
            with suppress(ValueError):
                if isfinite(number := float(value)):
                    yield name, dict(LABEL.findall(labels or "")), number


def read_load(samples: Iterable[Sample]) -> Load:
    """The load by the metrics of vLLM, SGLang, TGI or llama.cpp. Engines of one server add up."""
    waiting = [value for name, _, value in samples if name in WAITING]
    return Load(int(sum(waiting)) if waiting else None)


def from_metrics(samples: Iterable[Sample]) -> Capacity:
    """By metrics of vLLM and SGLang. Engines of one server add up."""
    total = Capacity()
    for name, labels, value in samples:
        if name == CACHE[0]:
            blocks, size = (_number(labels.get(k)) for k in ("num_gpu_blocks", "block_size"))
            total = Capacity(total.kv_tokens + blocks * size, size)
        elif name == CACHE[1]:
            total = replace(total, kv_tokens=total.kv_tokens + _number(value))
    return total


def from_models(card: Mapping[str, Any]) -> Capacity:
    """By a card of /v1/models: vLLM, SGLang and foretoken have `max_model_len`."""
    return Capacity(max_context_tokens=_number(card.get("max_model_len")))


def from_sglang(info: Mapping[str, Any]) -> Capacity:
    """By SGLang's /get_server_info, or /server_info."""
    return Capacity(
        kv_tokens=_number(info.get("max_total_num_tokens")),
        max_running=_number(info.get("max_running_requests")),
        max_context_tokens=_number(info.get("context_length")),
    )


def from_llama_cpp(props: Mapping[str, Any]) -> Capacity:
    """By llama.cpp's /props: each slot has a context of its own."""
    settings = props.get("default_generation_settings")
    context = _number(settings.get("n_ctx")) if isinstance(settings, dict) else 0
    slots = _number(props.get("total_slots"))
    return Capacity(slots * context, int(bool(slots)), slots, context)


def from_tgi(info: Mapping[str, Any]) -> Capacity:
    """By TGI's /info."""
    return Capacity(
        kv_tokens=_number(info.get("max_batch_total_tokens")),
        max_running=_number(info.get("max_concurrent_requests")),
        max_context_tokens=_number(info.get("max_total_tokens")),
    )


# Pages beside /v1/models and /metrics that tell capacities, and how they are read.
PAGES: Mapping[str, Callable[[Mapping[str, Any]], Capacity]] = {
    "/get_server_info": from_sglang,
    "/server_info": from_sglang,
    "/props": from_llama_cpp,
    "/info": from_tgi,
}


def _number(value: Any) -> int:
    """A size; 0 for what is none."""
    try:
        return max(0, int(float(value)))
    except (TypeError, ValueError, OverflowError):
        return 0


class Window:
    """How many requests run at the server at a time. A refusal for lack of capacity shrinks it to
    those that the server has accepted; it grows by an eighth a reading while it is full.

    Where the server tells how many requests wait in its own queue, none waits there for long: as
    long as some do, a finished request makes no room for another one. The order of waiting requests
    is then the scheduler's. The window never shrinks below what runs, so that no answer is cut off.
    """

    def __init__(self, most: int):
        self._most = most
        self._size = float(most)
        self._calm_readings = 0  # without growth, after a refusal

    @property
    def size(self) -> int:
        """At least 1."""
        return max(1, int(self._size))

    def on_refused(self, accepted: int) -> None:
        """The server refused a request for lack of capacity, beside those that it has accepted."""
        self._size = max(1.0, min(self._size, float(accepted)))
        self._calm_readings = CALM_READINGS

    def on_load(self, running: int, waiting: int | None) -> None:
        """A reading: how many requests run here, and how many wait in the server's queue."""
        if waiting:
            self._size = max(1.0, min(self._size, float(running)))
        elif self._calm_readings:
            self._calm_readings -= 1
        elif running >= self.size:
            self._size = min(float(self._most), self._size + max(1.0, self._size / GROWTH))
