"""Reads a LoRA adapter in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from sys import float_info
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 2**20
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

# Settings that change nothing once an adapter is trained, or that its weights already show.
WITHOUT_EFFECT: Collection[str] = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path"),
    *("revision", "inference_mode", "r", "target_modules", "exclude_modules", "lora_alpha"),
    *("lora_dropout", "fan_in_fan_out", "use_rslora", "layers_to_transform", "layers_pattern"),
    *("rank_pattern", "alpha_pattern", "megatron_core", "loftq_config", "eva_config"),
    *("qalora_group_size", "runtime_config", "ensure_weight_tying", "init_lora_weights", "bias"),
}
# What other settings do, in words; they are refused if they are set.
REFUSED: Mapping[str, str] = {
    "use_dora": "is a DoRA adapter, which scales the columns of the base weights",
    "modules_to_save": "replaces whole modules of the base model",
    "trainable_token_indices": "changes token embeddings",
    "layer_replication": "repeats layers of the base model",
    "lora_bias": "adds biases",
    "target_parameters": "changes parameters other than linear maps",
    "use_qalora": "is a QALoRA adapter",
    "alora_invocation_tokens": "is active only behind certain tokens (aLoRA)",
    "use_bdlora": "is a block-diagonal adapter",
}
REMEDY = "merge it into the base model and serve that"
# Initialisations that change the base model's weights, too, unless PEFT converts them on saving.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter's weights in host memory, by the path of the linear map that they change: A
    [rank, in] and B [out, rank] · scaling, in float32."""

    name: str
    path: str
    weights: Mapping[str, tuple[Tensor, Tensor]]

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for pair in self.weights.values() for part in pair)


def read_adapter(name: str, path: str, sizes: Mapping[str, tuple[int, int]], rank: int) -> Adapter:
    """Reads a folder. `sizes` are the (inputs, outputs) of the linear maps that adapters may
    change, by path. Raises ValueError with a sentence if the adapter cannot be read, needs what is
    not supported, has a rank above `rank`, or does not fit the model."""
    folder = Path(path)
    if not folder.is_dir():
        raise ValueError(f"the folder {path} of the adapter {name} does not exist on the worker")
    try:
        config = _read_config(folder)
        _require_supported(config)
        return Adapter(name, path, _read_weights(folder, config, sizes, rank))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"the adapter {name} in {path} cannot be read: {error}") from None
    except (ValueError, re.error) as error:
        raise ValueError(f"the adapter {name} in {path} {error}") from None


def _read_config(folder: Path) -> Mapping[str, Any]:
    file = folder / CONFIG
    if not file.is_file():
        raise ValueError(f"has no {CONFIG}: give a folder that PEFT has saved")
    if file.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"has an {CONFIG} of more than {MAX_CONFIG_BYTES} bytes")
    try:
        config = json.loads(file.read_text())
    except (ValueError, RecursionError):
        raise ValueError(f"has an {CONFIG} that is no JSON") from None
    if not isinstance(config, dict):
        raise ValueError(f"has an {CONFIG} that is no JSON object")
    return config


def _require_supported(config: Mapping[str, Any]) -> None:
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"is of the type {kind}: only LoRA adapters are supported")
    if (bias := config.get("bias", "none")) != "none":
        raise ValueError(f"changes biases (bias {bias}), which is not supported: {REMEDY}")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(CHANGES_BASE):
        raise ValueError(
            f"changes the base weights (init_lora_weights {start}), which is not supported: save "
            "it with path_initial_model_for_weight_conversion"
        )
    for key, value in config.items():
        if key in WITHOUT_EFFECT or not value:
            continue
        what = REFUSED.get(key, "has a setting of an unknown kind")
        raise ValueError(f"{what} ({key}), which is not supported: {REMEDY}")


def _read_weights(
    folder: Path, config: Mapping[str, Any], sizes: Mapping[str, tuple[int, int]], most: int
) -> Mapping[str, tuple[Tensor, Tensor]]:
    file = folder / WEIGHTS
    if not file.is_file():
        other = "; save it with safe_serialization" * (folder / "adapter_model.bin").exists()
        raise ValueError(f"has no {WEIGHTS}{other}")
    base = str(config.get("base_model_name_or_path") or "another model")
    with safe_open(file, framework="pt") as stored:
        keys = list(stored.keys())
        paths = sorted({_path_of(key) for key in keys})
        if not paths:
            raise ValueError("has no weights")
        for path in paths:  # before anything is read
            _check_shapes(stored, path, sizes, most, base)
        weights = {}
        for path in paths:
            down, up = (stored.get_tensor(PREFIX + path + end).float() for end in (DOWN, UP))
            up = up * _scaling(config, path, len(down))
            if not (torch.isfinite(down).all() and torch.isfinite(up).all()):
                raise ValueError(f"has weights that are no finite numbers, in {path}")
            weights[path] = down, up
    return weights


def _path_of(key: str) -> str:
    """The path of the linear map that a stored tensor changes."""
    for end in (DOWN, UP):
        if key.startswith(PREFIX) and key.endswith(end):
            return key[len(PREFIX) : -len(end)]
    raise ValueError(
        f"has the weight {key}, which is not of a linear map's A or B, and is not supported: "
        + REMEDY
    )


def _check_shapes(
    stored: Any, path: str, sizes: Mapping[str, tuple[int, int]], most: int, base: str
) -> None:
    if path not in sizes:
        raise ValueError(
            f"changes {path}, which is no linear map in a layer of this model; it was trained for "
            f"{base}: use an adapter of the served model"
        )
    keys = set(stored.keys())
    if missing := [end for end in (DOWN, UP) if PREFIX + path + end not in keys]:
        raise ValueError(f"lacks the weight {PREFIX + path + missing[0]}")
    down, up = (tuple(stored.get_slice(PREFIX + path + end).get_shape()) for end in (DOWN, UP))
    inputs, outputs = sizes[path]
    if len(down) != 2 or len(up) != 2 or down[0] != up[1] or not down[0]:
        raise ValueError(f"has weights of shapes {down} and {up} for {path}, which do not match")
    if (down[1], up[0]) != (inputs, outputs):
        raise ValueError(
            f"changes {path} from {down[1]} to {up[0]} numbers, where this model has {inputs} and "
            f"{outputs}; it was trained for {base}: use an adapter of the served model"
        )
    if down[0] > most:
        raise ValueError(f"has rank {down[0]}, above worker.max_lora_rank {most}: set that higher")


def _scaling(config: Mapping[str, Any], path: str, rank: int) -> float:
    """α / r, or α / √r with rank stabilisation."""
    alpha = _matching(config.get("alpha_pattern") or {}, path, config.get("lora_alpha", rank))
    if type(alpha) not in (int, float) or not abs(alpha) <= float_info.max:
        raise ValueError(f"has a lora_alpha that is no finite number: {alpha!r}")
    return float(alpha) / (sqrt(rank) if config.get("use_rslora") else rank)


def _matching(pattern: Any, path: str, default: Any) -> Any:
    """The value of the first pattern that matches the end of a path, as PEFT matches them."""
    if not isinstance(pattern, Mapping):
        raise ValueError("has an alpha_pattern that is no object")
    for key, value in pattern.items():
        if re.match(rf"(.*\.)?({key})$", path):
            return value
    return default
