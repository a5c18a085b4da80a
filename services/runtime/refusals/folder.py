"""Why a model's folder cannot be served, read from its files before anything is loaded.

As in `config`, each check returns a predicate about the model, such as "has no config.json: …", or
an empty string.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.runtime.refusals.config import find_config_fault, quantized

CONFIG, ADAPTER = "config.json", "adapter_config.json"
# In the order in which transformers looks for weights.
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
INDEXES = frozenset(name for name in WEIGHTS if name.endswith(".index.json"))
# Files of quantized checkpoints, also where config.json does not name the quantization.
QUANTIZED_FILES = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
TEKKEN = "tekken.json"  # Mistral's
TOKENIZER_NAMES = frozenset(("tokenizer.json", "vocab.json", "vocab.txt", TEKKEN))
TOKENIZER_ENDS = (".model", ".tiktoken")  # tokenizer.model, spiece.model, qwen.tiktoken …
LFS_POINTER = b"version https://git-lfs"
POINTER_BYTES = 1024  # a pointer is shorter


@dataclass(frozen=True)
class ModelFolder:
    """The names of a model's files, and its config.json."""

    path: Path
    names: frozenset[str]
    config: Mapping[str, Any]


def find_model_fault(folder: Path) -> str:
    """Why foretoken cannot serve a folder's model; empty if its files show no reason."""
    # The hub's cache links to files, of which some may be gone.
    names = frozenset(each.name for each in folder.iterdir() if each.exists())
    if fault := find_missing_file(names):
        return fault
    try:
        config = read_config(folder)
    except (OSError, ValueError) as error:
        return f"has a {CONFIG} that cannot be read ({error}): download it again"
    model = ModelFolder(folder, names, config)
    faults = (check(model) for check in CHECKS)
    return next((fault for fault in faults if fault), "")


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json. Raises OSError or ValueError if it cannot be read."""
    config = json.loads((folder / CONFIG).read_text())
    if not isinstance(config, dict):
        raise ValueError("it is not a JSON object")
    return config


def find_tokenizer_fault(folder: Path) -> str:
    """Why a folder's tokenizer cannot be used; empty if its files show no reason."""
    files = _find_tokenizer_files(folder)
    if not files:
        return (
            "has no tokenizer files, such as tokenizer.json: copy them from the checkpoint that "
            "its weights come from"
        )
    return _find_pointer(files)


def has_only_tekken(folder: Path) -> bool:
    """Whether a folder has its tokenizer only as tekken.json."""
    return [each.name for each in _find_tokenizer_files(folder)] == [TEKKEN]


def _find_tokenizer_files(folder: Path) -> list[Path]:
    return [each for each in folder.iterdir() if is_tokenizer_file(each.name) and each.exists()]


def find_missing_file(names: Collection[str]) -> str:
    """Why files with these names are no checkpoint that foretoken can load; empty if they are."""
    if ADAPTER in names:
        return (
            "is an adapter (it has an adapter_config.json), not a model: serve its base model, "
            "with --lora-modules NAME=FOLDER for this folder"
        )
    if any(name in names for name in WEIGHTS):
        return "" if CONFIG in names else f"has no {CONFIG}: copy it from the original checkpoint"
    if any(name.endswith(".gguf") for name in names):
        return (
            "has its weights as GGUF, which foretoken does not read: serve the original checkpoint "
            "with safetensors files"
        )
    if CONFIG not in names:
        return f"has no {CONFIG}: pass the folder of a checkpoint in transformers' format"
    return f"has no weights ({WEIGHTS[0]} or {WEIGHTS[1]}): download them"


def is_tokenizer_file(name: str) -> bool:
    """Whether a file with this name can be all that a tokenizer needs."""
    return name in TOKENIZER_NAMES or name.endswith(TOKENIZER_ENDS)


def _find_quantized_file(model: ModelFolder) -> str:
    methods = [quantized(QUANTIZED_FILES[name]) for name in QUANTIZED_FILES if name in model.names]
    return methods[0] if methods else ""


def _find_missing_shard(model: ModelFolder) -> str:
    """Missing and broken files among the weights that transformers would load."""
    first = next(name for name in WEIGHTS if name in model.names)
    files = _read_shards(model.path / first) if first in INDEXES else [first]
    if not files:
        return f"has a {first} that names no files: download it again"
    missing = [name for name in files if name not in model.names]
    if missing:
        return (
            f"lacks {missing[0]} ({len(missing)} of the {len(files)} files that {first} names): "
            "download it again"
        )
    return _find_pointer([model.path / name for name in files])


def _read_shards(index: Path) -> list[str]:
    """The files that an index names; empty if it cannot be read."""
    try:
        named: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return sorted(set(named.values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return []


def _find_pointer(files: Sequence[Path]) -> str:
    """Files that Git LFS has not fetched."""
    for path in files:
        if path.stat().st_size <= POINTER_BYTES and path.read_bytes().startswith(LFS_POINTER):
            return f"has a Git LFS pointer in place of {path.name}: run git lfs pull in its folder"
    return ""


CHECKS: tuple[Callable[[ModelFolder], str], ...] = (
    lambda model: find_config_fault(model.config),
    _find_quantized_file,
    _find_missing_shard,
)
