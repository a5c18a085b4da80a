"""The demo model at a size where the engine, not the gateway or the client, is the bottleneck.

Zeros widen the hidden state and the MLP, so each step multiplies matrices of real size and the
answers stay the same.
"""

import json
from pathlib import Path
from shutil import copytree

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HIDDEN, MLP = 1_024, 2_048
HIDDEN_IN = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "embed_tokens.weight")
MLP_IN = ("gate_proj.weight", "up_proj.weight")


def write_padded(source: Path, folder: Path, hidden: int = HIDDEN, mlp: int = MLP) -> None:
    """Writes a float32 copy of the Llama checkpoint in `source`, padded to `hidden` and `mlp`.

    RMSNorm divides by a mean over all positions. Its weights shrink by the square root of the
    growth in width, and epsilon by the growth itself, so that the padded norm returns the same
    values. Raises ValueError if the checkpoint is wider than `hidden` or `mlp`.
    """
    config = json.loads((source / "config.json").read_text())
    growth = hidden / config["hidden_size"]
    if growth < 1 or mlp < config["intermediate_size"]:
        raise ValueError(f"{source} is wider than hidden {hidden} and MLP {mlp}")
    copytree(source, folder)
    sizes = {"hidden_size": hidden, "intermediate_size": mlp, "dtype": "float32"}
    widened = {**config, **sizes, "rms_norm_eps": config["rms_norm_eps"] / growth}
    (folder / "config.json").write_text(json.dumps(widened, indent=2))
    weights = load_file(source / "model.safetensors")
    padded = {name: _pad(name, weight, growth, mlp) for name, weight in weights.items()}
    save_file(padded, folder / "model.safetensors", metadata={"format": "pt"})


def _pad(name: str, weight: Tensor, growth: float, mlp: int) -> Tensor:
    weight = weight.float()
    if name.endswith("norm.weight"):
        hidden = round(growth * len(weight))
        return torch.cat([weight / growth**0.5, weight.new_zeros(hidden - len(weight))])
    rows, columns = weight.shape
    if name.endswith(HIDDEN_IN):
        columns = round(growth * columns)
    elif name.endswith(MLP_IN):
        rows, columns = mlp, round(growth * columns)
    elif name.endswith("down_proj.weight"):
        rows, columns = round(growth * rows), mlp
    else:  # o_proj
        rows = round(growth * rows)
    out = weight.new_zeros(rows, columns)
    out[: weight.shape[0], : weight.shape[1]] = weight
    return out
