"""Every reason to refuse a model that its files show, as an exact sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from services.runtime.refusals.config import find_config_fault, find_head_fault
from services.runtime.refusals.folder import (
    find_missing_file,
    find_model_fault,
    find_tokenizer_fault,
    has_only_tekken,
)

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
FAMILY = "serve a model of a family that docs/models.md lists"
STATE = "keep a state beside keys and values, which the paged KV cache does not hold"
SELECTED = "attend to selected keys, which the paged attention kernels do not support"
ADAPTER = (
    "is an adapter (it has an adapter_config.json), not a model: serve its base model, with "
    "--lora-modules NAME=FOLDER for this folder"
)
GGUF = (
    "has its weights as GGUF, which foretoken does not read: serve the original checkpoint with "
    "safetensors files"
)
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"


def folder(path: Path, config: object = None, **files: str) -> Path:
    """A folder with these texts as files; a name has __ for a dot."""
    files = {"model__safetensors": "", **files}
    for name, content in files.items():
        (path / name.replace("__", ".")).write_text(content)
    (path / "config.json").write_text(json.dumps(LLAMA if config is None else config))
    return path


def quantized(label: str) -> str:
    return (
        f"is quantized with {label}, which foretoken does not read: serve the unquantized "
        "checkpoint"
    )


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ("config.json model.safetensors", ""),
        ("config.json pytorch_model.bin", ""),
        ("config.json model.safetensors.index.json tokenizer.json", ""),
        ("config.json model.safetensors model-q4.gguf", ""),
        ("", "has no config.json: pass the folder of a checkpoint in transformers' format"),
        (
            "params.json consolidated.safetensors",
            "has no config.json: pass the folder of a checkpoint in transformers' format",
        ),
        ("model.safetensors", "has no config.json: copy it from the original checkpoint"),
        (
            "config.json tokenizer.json",
            "has no weights (model.safetensors or model.safetensors.index.json): download them",
        ),
        ("model-q4.gguf", GGUF),
        ("config.json model-q4.gguf", GGUF),
        ("adapter_config.json adapter_model.safetensors", ADAPTER),
        ("config.json model.safetensors adapter_config.json", ADAPTER),
    ],
)
def test_missing_file_is_named(names: str, fault: str):
    assert find_missing_file(names.split()) == fault


@pytest.mark.parametrize(
    ("config", "fault"),
    [
        ({}, ""),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ""),
        ({"quantization_config": {"quant_method": "awq"}}, quantized("AWQ")),
        ({"quantization_config": {"quant_method": "gptq"}}, quantized("GPTQ")),
        ({"quantization_config": {"quant_method": "fp8"}}, quantized("FP8")),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            quantized("bitsandbytes"),
        ),
        ({"quantization_config": {"bits": 4}}, quantized("an unnamed method")),
        ({"text_config": {"quantization_config": {"quant_method": "awq"}}}, quantized("AWQ")),
        ({"quantization": {"bits": 4, "group_size": 64}}, quantized("MLX")),
        (
            {"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5Model"]},
            "is an encoder-decoder model (t5), and foretoken serves decoder-only models: " + FAMILY,
        ),
        (
            {"architectures": ["Qwen2ForSequenceClassification"]},
            "is a Qwen2ForSequenceClassification, which generates no text: serve a checkpoint of a "
            "causal language model (…ForCausalLM)",
        ),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            "has attention sinks, which the paged attention kernels do not support: " + FAMILY,
        ),
        (
            {"layer_types": ["linear_attention"] * 3 + ["full_attention"]},
            f"has layers of the kind linear_attention (3 of 4), which {STATE}: {FAMILY}",
        ),
        (
            {"text_config": {"layer_types": ["chunked_attention", "full_attention"]}},
            f"has layers of the kind chunked_attention (1 of 2), which {SELECTED}: {FAMILY}",
        ),
    ],
)
def test_unsupported_config_is_explained(config: dict[str, Any], fault: str):
    assert find_config_fault({**LLAMA, **config}) == fault


def test_every_causal_model_of_transformers_generates_text():
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for name in [names] if isinstance(names, str) else names:
            assert find_head_fault([name]) == ""


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ({}, ""),
        ({"quantize_config__json": "{}"}, quantized("GPTQ")),
        ({"quant_config__json": "{}"}, quantized("AWQ")),
        ({"hf_quant_config__json": "{}"}, quantized("modelopt")),
        (
            {"model__safetensors": POINTER},
            "has a Git LFS pointer in place of model.safetensors: run git lfs pull in its folder",
        ),
    ],
)
def test_file_contents_are_checked(tmp_path: Path, files: dict[str, str], fault: str):
    assert find_model_fault(folder(tmp_path, **files)) == fault


def test_missing_shard_is_named(tmp_path: Path):
    index = tmp_path / "model.safetensors.index.json"
    shards = {"a": "model-1.safetensors", "b": "model-2.safetensors", "c": "model-3.safetensors"}
    index.write_text(json.dumps({"weight_map": shards}))
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model-1.safetensors").touch()
    assert find_model_fault(tmp_path) == (
        "lacks model-2.safetensors (2 of the 3 files that model.safetensors.index.json names): "
        "download it again"
    )
    for name in shards.values():
        (tmp_path / name).touch()
    assert find_model_fault(tmp_path) == ""
    for broken in ("{ not json", "[]", '{"weight_map": {}}'):
        index.write_text(broken)
        assert find_model_fault(tmp_path) == (
            "has a model.safetensors.index.json that names no files: download it again"
        )


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (
            "{ not json",
            "Expecting property name enclosed in double quotes: line 1 column 3 (char 2)",
        ),
        ("[]", "it is not a JSON object"),
    ],
)
def test_broken_config_is_reported(tmp_path: Path, content: str, why: str):
    (folder(tmp_path) / "config.json").write_text(content)
    fault = f"has a config.json that cannot be read ({why}): download it again"
    assert find_model_fault(tmp_path) == fault


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer.json",
        "tokenizer.model",
        "spiece.model",
        "vocab.txt",
        "vocab.json",
        "qwen.tiktoken",
    ],
)
def test_any_tokenizer_file_is_accepted(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    assert find_tokenizer_fault(tmp_path) == ""


def test_missing_tokenizer_is_reported(tmp_path: Path):
    (folder(tmp_path) / "tokenizer_config.json").write_text("{}")
    assert find_tokenizer_fault(tmp_path) == (
        "has no tokenizer files, such as tokenizer.json: copy them from the checkpoint that its "
        "weights come from"
    )
    (tmp_path / "tekken.json").touch()
    assert find_tokenizer_fault(tmp_path) == "" and has_only_tekken(tmp_path)
    (tmp_path / "tokenizer.json").write_text(POINTER)
    assert not has_only_tekken(tmp_path)
    assert find_tokenizer_fault(tmp_path) == (
        "has a Git LFS pointer in place of tokenizer.json: run git lfs pull in its folder"
    )
