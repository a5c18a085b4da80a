"""Adapters in PEFT's format with random weights, and models with an adapter merged by hand."""

import json
from collections.abc import Mapping, Sequence
from copy import deepcopy
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Weights = Mapping[str, tuple[Tensor, Tensor]]


def random_weights(
    module: PreTrainedModel, seed: int, rank: int = 4, targets: Sequence[str] = ALL
) -> Weights:
    """A [rank, in] and B [out, rank] of each linear map with a target's name."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    return {
        path: (random(rank, part.in_features), random(part.out_features, rank))
        for path, part in module.named_modules()
        if isinstance(part, nn.Linear) and path.endswith(tuple(targets))
    }


def write_adapter(folder: Path, weights: Weights, alpha: float = 8, **settings: Any) -> str:
    """Writes the folder as PEFT does; `settings` are further ones of its config."""
    rank = len(next(iter(weights.values()))[0]) if weights else 1
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "a-base",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.05,
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "target_modules": sorted({path.rsplit(".", 1)[-1] for path in weights}),
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for path, (down, up) in weights.items():
        tensors[f"base_model.model.{path}.lora_A.weight"] = down.contiguous()
        tensors[f"base_model.model.{path}.lora_B.weight"] = up.contiguous()
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)


def merged(
    module: PreTrainedModel, weights: Weights, alpha: float = 8, stabilised: bool = False
) -> PreTrainedModel:
    """A copy of the model with W + B A · α / r, or α / √r, in each changed map."""
    copy = deepcopy(module)
    for path, (down, up) in weights.items():
        rank = len(down)
        part = copy.get_submodule(path)
        assert isinstance(part, nn.Linear)
        part.weight.data += (up @ down) * (alpha / (sqrt(rank) if stabilised else rank))
    return copy
