"""LoRA adapters of the demo model, written without PyTorch."""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from tests.live import ROOT

WEIGHTS = ROOT / "models/demo/model.safetensors"
RANK = 4
SIZE = 0.2  # of the numbers: large enough to change answers


def write_demo_adapter(folder: Path) -> str:
    """Writes an adapter of random numbers, which depend on the folder's name, for all linear maps
    of the layers."""
    random, tensors = np.random.default_rng([*folder.name.encode()]), {}
    with safe_open(WEIGHTS, framework="numpy") as model:
        names = [name for name in model.keys() if name.endswith("_proj.weight")]  # noqa: SIM118 - it is no dict
        for name in names:
            outputs, inputs = model.get_slice(name).get_shape()
            path = f"base_model.model.{name.removesuffix('.weight')}"
            for part, shape in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
                numbers = SIZE * random.standard_normal(shape)
                tensors[f"{path}.lora_{part}.weight"] = numbers.astype(np.float32)
    folder.mkdir()
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return str(folder)
