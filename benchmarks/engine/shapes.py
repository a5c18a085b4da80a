"""Measured models: the demo model, the same padded with zeros, and larger shapes with random
weights."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config

from benchmarks.harness.report import parser
from foretoken.running.options import demo_model
from models.padded import write_padded

TOKENIZER_FILES = ("tokenizer_config.json", "chat_template.jinja")
SHAPES: dict[str, dict[str, Any]] = {
    # config.json of Qwen3-0.6B with a tenth of its positions
    "qwen3-0.6b": {
        "vocab_size": 151_936,
        "hidden_size": 1_024,
        "intermediate_size": 3_072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 4_096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    },
}


def engine_options(description: str | None, models: str, streams: str) -> ArgumentParser:
    """Parser of `--json`, `--quick`, `--models`, `--dtypes`, `--streams` and `--rounds`."""
    options = parser(description)
    options.add_argument("--models", default=models)
    options.add_argument("--dtypes", default="fp32")
    options.add_argument("--streams", default=streams)
    options.add_argument("--rounds", type=int, default=5)
    return options


def each_model(options: Namespace) -> Iterator[tuple[str, str, str]]:
    """Yields name, folder and dtype of each model to measure. Its folder exists until the next."""
    for model in options.models.split(","):
        with TemporaryDirectory(prefix="foretoken-models-") as temporary:
            folder = folder_of(model, Path(temporary))
            for dtype in options.dtypes.split(","):
                yield model, folder, dtype


def folder_of(name: str, temporary: Path) -> str:
    """Returns the demo model's folder, or writes the padded one, or a model with that shape, below
    `temporary`."""
    if name == "padded":
        write_padded(Path(demo_model()), temporary / name)
        return str(temporary / name)
    if name not in SHAPES:
        return demo_model()
    return write_model(temporary / name, Qwen3Config(**SHAPES[name]))


def write_model(folder: Path, config: PretrainedConfig) -> str:
    """Writes random weights in bfloat16, the same each time, and the demo model's tokenizer with a
    word for every further id."""
    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    module.save_pretrained(folder)
    demo = Path(demo_model())
    for name in TOKENIZER_FILES:
        copy(demo / name, folder / name)
    tokenizer = widened(json.loads((demo / "tokenizer.json").read_text()), config.vocab_size)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def widened(tokenizer: dict[str, Any], vocabulary: int) -> dict[str, Any]:
    """Adds words (<1291>, <1292> …) to a tokenizer.json, so that every id in the vocabulary is
    text."""
    words: dict[str, int] = tokenizer["model"]["vocab"]
    taken = set(words.values()) | {added["id"] for added in tokenizer["added_tokens"]}
    more = {f"<{i}>": i for i in range(vocabulary) if i not in taken}
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": words | more}}


def kv_bytes_per_token(folder: str, element_bytes: int) -> int:
    """Returns the size of keys and values over all layers."""
    config = json.loads((Path(folder) / "config.json").read_text())
    heads = config["num_key_value_heads"] * config["head_dim"]
    return int(2 * config["num_hidden_layers"] * heads * element_bytes)
