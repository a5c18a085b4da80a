"""Memory check before a model's weights are loaded, and progress while they are.

transformers maps safetensors files into memory. A CPU computes on the mapped pages if the files
have the requested dtype, else on a converted copy. A GPU copies each tensor from the mapped pages.
"""

import json
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch
from huggingface_hub import HfApi, try_to_load_from_cache
from safetensors import safe_open
from torch import nn
from transformers.utils import logging as transformers_logging

from services.worker.machine import free_host_bytes

log = logging.getLogger(__name__)

T = TypeVar("T")

LOG_INTERVAL_S = 2.0  # faster loads log nothing
GIB = 2**30

# Bytes per element by safetensors name. Only FLOATS are converted on load.
FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
OTHERS = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1,
          "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}  # fmt: skip
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def require_memory(
    name: str, device: torch.device, dtype: str, hub: HfApi | None = None, parts: int = 1
) -> None:
    """Raises ValueError if the weights of a folder or Hub id, or one of `parts` equal shards, need
    more memory than is free.

    Computed from the files' headers, before anything is loaded or fetched. Passes if the size is
    unknown (other formats, an unreachable Hub).
    """
    elements = stored_elements(name, hub or HfApi())
    in_host = device.type == "cpu"
    free = _free_bytes(device)
    needed = needed_bytes(elements, dtype) // parts
    if needed <= free:
        return
    half = needed_bytes(elements, "bfloat16") // parts
    smaller = half < needed and half <= free
    remedy = (
        f"set dtype to bfloat16, which takes {half / GIB:.1f} GiB"
        if smaller
        else "use a smaller model, or a machine with more memory"
    )
    kind = f" as {dtype}" if dtype in DTYPES else ""
    place = "host" if in_host else "GPU"
    raise ValueError(
        f"its weights take {needed / GIB:.1f} GiB{kind}, but only {free / GIB:.1f} GiB of {place} "
        f"memory are free: {remedy}"
    )


def _free_bytes(device: torch.device) -> int:
    return free_host_bytes() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]


def require_adapter_memory(
    module: nn.Module, device: torch.device, most: int, slots: int, rank: int, dtype: torch.dtype
) -> None:
    """Raises ValueError if `most` adapters of this rank, in every linear map, and `slots` of them
    on the device need more memory than is free."""
    maps = (part for part in module.modules() if type(part) is nn.Linear)
    numbers = sum(part.in_features + part.out_features for part in maps)
    each = rank * numbers * dtype.itemsize
    _require_free(f"{slots} slots for LoRA adapters", slots * each, _free_bytes(device), rank)
    in_host = most + slots * (device.type == "cpu")
    _require_free(f"{most} LoRA adapters", in_host * each, free_host_bytes(), rank)


def _require_free(what: str, needed: int, free: int, rank: int) -> None:
    if needed > free:
        raise ValueError(
            f"{what} of rank {rank} take {needed / GIB:.1f} GiB, but only {free / GIB:.1f} GiB of "
            "memory are free: set worker.max_adapters, worker.adapter_slots or "
            "worker.max_lora_rank lower"
        )


def needed_bytes(elements: Mapping[str, int], dtype: str) -> int:
    """Returns the bytes of `elements` (count by stored type) loaded as `dtype`, or as stored."""
    target = DTYPES.get(dtype)
    floats = sum((target or size) * elements.get(kind, 0) for kind, size in FLOATS.items())
    return floats + sum(size * elements.get(kind, 0) for kind, size in OTHERS.items())


def stored_elements(name: str, hub: HfApi) -> Mapping[str, int]:
    """Returns the number of elements by type in a model's files; empty if unknown."""
    if Path(name).is_dir():
        return _elements(_weight_files(Path(name)))
    cached = try_to_load_from_cache(name, "config.json")
    files = _weight_files(Path(cached).parent) if isinstance(cached, str) else []
    return _elements(files) if files else _hub_elements(name, hub)


def _weight_files(folder: Path) -> Sequence[Path]:
    """Returns the safetensors files that transformers would load; empty if any is missing."""
    if (whole := folder / "model.safetensors").exists():
        return [whole]
    if not (index := folder / "model.safetensors.index.json").exists():
        return []
    files = [folder / file for file in set(json.loads(index.read_text())["weight_map"].values())]
    return files if all(file.exists() for file in files) else []


def _elements(files: Sequence[Path]) -> Mapping[str, int]:
    count: Counter[str] = Counter()
    for path in files:
        # With NumPy the file is mapped, which counts towards no limit of memory.
        with safe_open(path, framework="numpy") as file:
            for key in file.keys():  # noqa: SIM118 - not a dict
                tensor = file.get_slice(key)
                count[tensor.get_dtype()] += prod(tensor.get_shape())
    return count


def _hub_elements(name: str, hub: HfApi) -> Mapping[str, int]:
    try:
        counts = hub.get_safetensors_metadata(name).parameter_count
    except Exception:  # a wrong name, a Hub or network error: loading reports it
        return {}
    elements = {str(kind): count for kind, count in counts.items()}
    log.info("downloading %s from the Hub: %.1f GiB", name, needed_bytes(elements, "") / GIB)
    return elements


@contextmanager
def logged_loading() -> Iterator[None]:
    """Context in which slow transformers progress bars are written to the log."""
    before = transformers_logging.set_tqdm_hook(_bar)
    try:
        yield
    finally:
        transformers_logging.set_tqdm_hook(before)


def _bar(
    factory: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[Any]:
    if args and isinstance(args[0], Collection):
        return logged_progress(args[0], kwargs.get("desc") or "Loading")
    bar: Iterator[Any] = factory(*args, **kwargs)
    return bar


def logged_progress(
    items: Collection[T], label: str, clock: Callable[[], float] = monotonic
) -> Iterator[T]:
    """Yields the items; logs the progress every `LOG_INTERVAL_S`."""
    began_s = logged_s = clock()
    for done, item in enumerate(items):
        if (now_s := clock()) - logged_s >= LOG_INTERVAL_S:
            log.info("%s: %d%% in %.0f s", label, 100 * done // len(items), now_s - began_s)
            logged_s = now_s
        yield item
    if logged_s > began_s:
        log.info("%s: done in %.0f s", label, clock() - began_s)
