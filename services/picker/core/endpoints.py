"""Endpoints of the pool: addresses, and what a model server's metrics say. Pure."""

import json
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from math import isfinite
from typing import Any
from urllib.parse import urlencode

ADDRESS_RULE = "is not IP:PORT; names are resolved by picker.dns"


class EndpointsError(ValueError):
    """A list of endpoints that cannot be used, in one sentence."""


def is_address(text: str) -> bool:
    """Whether `text` is IP:PORT, with brackets around an IPv6 address."""
    host, _, port = text.rpartition(":")
    try:
        ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
    except ValueError:
        return False
    return is_port(port) and (":" not in host or host[0] == "[")


def is_port(text: str) -> bool:
    """Whether `text` is a port from 1 to 65535."""
    digits = text.isascii() and text.isdecimal() and len(text) <= 5
    return digits and 0 < int(text) < 65_536


PARSERS: Mapping[str, Callable[[str], Any]] = {".toml": tomllib.loads, ".json": json.loads}


def parse_endpoints(text: str, suffix: str) -> tuple[str, ...]:
    """The addresses of a file: `endpoints`, or in JSON also a plain list. Raises EndpointsError."""
    if suffix not in PARSERS:
        raise EndpointsError(f"name it *.toml or *.json, not *{suffix}")
    try:
        content = PARSERS[suffix](text)
    except (ValueError, RecursionError) as error:
        raise EndpointsError(f"not valid {suffix[1:].upper()}: {error}") from None
    listed = content.get("endpoints") if isinstance(content, dict) else content
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise EndpointsError('it needs a list, such as endpoints = ["10.0.0.1:8000"]')
    wrong = next((each for each in listed if not is_address(each)), None)
    if wrong is not None:
        raise EndpointsError(f"{wrong!r} {ADDRESS_RULE}")
    return tuple(dict.fromkeys(listed))


@dataclass(frozen=True, slots=True)
class Reading:
    """Metrics of a model server at one time, over all of its engines. `kv_tokens` is the capacity
    of its KV cache, 0 where it does not say so."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    kv_tokens: int = 0


NAMES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info")
SERIES = re.compile(rf"^vllm:({'|'.join(NAMES)})(?:\{{([^\n]*)\}})? (\S+)".encode(), re.MULTILINE)
# Servers that use Prometheus' library, and foretoken, answer with these series alone.
QUERY = urlencode([("name[]", f"vllm:{name}") for name in NAMES])
LABEL = re.compile(rb'(block_size|num_gpu_blocks)="(\d{1,12})"')
MAX_REQUESTS = 65_536  # of one server; more is no count of requests


def parse_metrics(text: bytes) -> Reading:
    """Reads the model-server metrics that vLLM names and others copy. Counts and capacities of
    several engines add up; the usage is their mean. Raises ValueError without the two counts, and
    for values that cannot be."""
    found: dict[bytes, list[float]] = {}
    kv_tokens = 0
    for name, labels, value in SERIES.findall(text):
        if name == b"cache_config_info":
            sizes = dict(LABEL.findall(labels))
            kv_tokens += int(sizes.get(b"block_size", 0)) * int(sizes.get(b"num_gpu_blocks", 0))
        else:
            found.setdefault(name, []).append(float(value))
    if b"num_requests_running" not in found or b"num_requests_waiting" not in found:
        raise ValueError("its metrics lack vllm:num_requests_running and vllm:num_requests_waiting")
    if not all(isfinite(value) for values in found.values() for value in values):
        raise ValueError("its metrics have values that are not finite")
    running, waiting = sum(found[b"num_requests_running"]), sum(found[b"num_requests_waiting"])
    if not (0 <= running <= MAX_REQUESTS and 0 <= waiting <= MAX_REQUESTS):
        raise ValueError(f"its metrics count {running:g} running and {waiting:g} waiting requests")
    usages = found.get(b"kv_cache_usage_perc", [0.0])
    return Reading(
        int(running),
        int(waiting),
        min(1.0, max(0.0, sum(usages) / len(usages))),
        kv_tokens,
    )
