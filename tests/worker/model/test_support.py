"""Models that are refused at start: each with one exact sentence, most before weights are read."""

import json
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Qwen2Config,
    Qwen2Model,
    T5Config,
    T5ForConditionalGeneration,
)

from services.worker.config import EngineConfig
from services.worker.model.paged import PagedModel, load_model
from services.worker.model.paged_attention import paged_attention
from services.worker.model.probe import Probe, UnsupportedAttention
from services.worker.parallel.loading import settled
from tests.worker.worker_fixtures import GROUPED, reference

CPU = torch.device("cpu")
FAMILY = "serve a model of a family that docs/models.md lists"
STATE = "keep a state beside keys and values, which the paged KV cache does not hold"
SELECTED = "attend to selected keys, which the paged attention kernels do not support"
SINKS = "has attention sinks, which the paged attention kernels do not support"
OWN = "computes attention in code of its own, where foretoken cannot use its paged KV cache"
VERSION = transformers.__version__
COPY = "copy both config.json and the weights from the original checkpoint"
LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def refusal(folder: Path) -> str:
    """The sentence with which a model is refused."""
    with pytest.raises(ValueError, match="cannot load model") as refused:
        load_model(str(folder), CPU)
    sentence = str(refused.value).removeprefix(f"cannot load model {str(folder)!r}: ")
    assert "\n" not in sentence
    return sentence


def claimed(folder: Path, config: Mapping[str, Any]) -> Path:
    """A folder with this config and a weights file that nothing may read."""
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_text("not weights")
    return folder


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"model_type": "gpt_oss"}, f"it {SINKS}: {FAMILY}"),
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 4},
            f"it has layers of the kind linear_attention (3 of 4), which {STATE}: {FAMILY}",
        ),
        (
            {"model_type": "qwen3_5", "text_config": {"num_hidden_layers": 8}},
            f"it has layers of the kind linear_attention (6 of 8), which {STATE}: {FAMILY}",
        ),
        (
            {"model_type": "mamba2", "num_hidden_layers": 2},
            f"it has layers of the kind linear_attention (2 of 2), which {STATE}: {FAMILY}",
        ),
        (
            {"model_type": "falcon_h1", "num_hidden_layers": 2},
            f"it has layers of the kind hybrid (2 of 2), which {STATE}: {FAMILY}",
        ),
        (
            {"model_type": "llama4_text", "num_hidden_layers": 4},
            f"it has layers of the kind chunked_attention (3 of 4), which {SELECTED}: {FAMILY}",
        ),
        (
            {"model_type": "deepseek_v32", "num_hidden_layers": 2},
            f"it has layers of the kind indexed_attention (2 of 2), which {SELECTED}: {FAMILY}",
        ),
        ({"model_type": "bloom"}, f"it is a BloomForCausalLM, which {OWN}: {FAMILY}"),
        ({"model_type": "falcon"}, f"it is a FalconForCausalLM, which {OWN}: {FAMILY}"),
        (
            {"model_type": "llama", "quantization_config": {"quant_method": "awq"}},
            "it is quantized with AWQ, which foretoken does not read: serve the unquantized "
            "checkpoint",
        ),
        (
            {"model_type": "grok9", "auto_map": {"AutoConfig": "configuration_grok.Grok9Config"}},
            f"it is of the type grok9, which transformers {VERSION} does not contain: upgrade "
            f"transformers, or {FAMILY} (code in a model's folder is not run)",
        ),
        (
            {"hidden_size": 8},
            "it has no model_type in its config.json: copy the original checkpoint's config.json",
        ),
        (
            {"model_type": "llava"},
            "it is of the type llava, which transformers does not load as a causal language model: "
            f"{FAMILY}",
        ),
    ],
)
def test_unsupported_model_is_refused_before_its_weights_are_read(
    config: dict[str, Any], sentence: str, tmp_path: Path
):
    assert refusal(claimed(tmp_path, config)) == sentence
    with pytest.raises(ValueError, match="cannot load model") as refused:
        settled(EngineConfig(model=str(tmp_path), device="cpu", tensor_parallel=2))
    assert str(refused.value).endswith(sentence)


def test_encoder_decoder_model_is_refused(tmp_path: Path):
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    T5ForConditionalGeneration(T5Config(vocab_size=96, **sizes)).save_pretrained(tmp_path)
    assert refusal(tmp_path) == (
        "it is an encoder-decoder model (t5), and foretoken serves decoder-only models: " + FAMILY
    )


def test_tied_model_without_a_head_is_refused(tmp_path: Path):
    """An embedding model: its missing head would silently be the tied embedding."""
    Qwen2Model(Qwen2Config(**GROUPED, tie_word_embeddings=True)).save_pretrained(tmp_path)
    assert refusal(tmp_path) == (
        "it is a Qwen2Model, which generates no text: serve a checkpoint of a causal language "
        "model (…ForCausalLM)"
    )


@pytest.mark.parametrize(
    ("model_type", "sentence"),
    [
        (
            "diffllama",
            "its DiffLlamaForCausalLM attends more than once in a layer, which the paged KV cache "
            f"does not support: {FAMILY}",
        ),
        (
            "stablelm",
            "its StableLmForCausalLM does not pass the arguments of its forward on to its "
            f"attention, so that foretoken cannot use its paged KV cache: {FAMILY}",
        ),
    ],
)
def test_attention_that_cannot_be_replaced_is_refused(
    model_type: str, sentence: str, tmp_path: Path
):
    config = AutoConfig.for_model(model_type, **GROUPED)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert refusal(tmp_path) == sentence


def mixed(call: Any, x: Tensor) -> Tensor:
    """Adds to each token the previous one, as a convolution does."""
    y: Tensor = call(x)
    return y + torch.nn.functional.pad(y, (0, 0, 1, 0))[:, :-1]


def test_state_beside_attention_is_found_when_it_leaks_into_another_sequence():
    """Every layer attends, and the config declares nothing."""
    module = deepcopy(reference("llama"))
    mlp = module.model.layers[0].mlp
    mlp.forward = partial(mixed, mlp.forward)
    with pytest.raises(ValueError, match="otherwise") as refused:
        PagedModel(module, CPU)
    assert str(refused.value) == (
        "it is a LlamaForCausalLM, which computes two sequences in one batch with paged attention "
        f"otherwise than each alone with transformers' attention: {FAMILY}"
    )


def test_sinks_that_no_config_declares_are_refused():
    q = k = v = torch.ones(1, 2, 3, 4)
    module: Any = reference("llama").model.layers[0].self_attn
    with pytest.raises(UnsupportedAttention, match=SINKS):
        paged_attention(module, q, k, v, None, foretoken=Probe(), s_aux=torch.zeros(2))


def test_missing_or_broken_folder_is_one_sentence(tmp_path: Path):
    with pytest.raises(ValueError, match=r"cannot load .*nowhere': the folder does not exist"):
        load_model(str(tmp_path / "nowhere"), CPU)
    assert refusal(tmp_path) == (
        "it has no config.json: pass the folder of a checkpoint in transformers' format"
    )
    claimed(tmp_path, {"model_type": "llama"})
    assert refusal(tmp_path).startswith("a file of its weights is broken (")
    claimed(tmp_path, {"model_type": "llama", "hidden_size": "eight"})
    assert "hidden_size" in refusal(tmp_path)


def test_truncated_weights_file_is_one_sentence(tmp_path: Path):
    reference("llama").save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    sentence = refusal(tmp_path)
    assert sentence.startswith("a file of its weights is broken (")
    assert sentence.endswith("): download it again")


def test_missing_weights_are_an_error(tmp_path: Path):
    reference("llama").save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert refusal(tmp_path) == (
        f"its files lack weights, such as model.norm.weight (1 in all): {COPY}"
    )


def changed(folder: Path, **values: Any) -> Path:
    """A saved model with a config.json that says something else."""
    reference("llama").save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


def test_weights_of_another_shape_are_an_error(tmp_path: Path):
    assert refusal(changed(tmp_path, vocab_size=97)) == (
        "its files have weights of another shape than its config.json says, such as "
        f"lm_head.weight, [96, 32] instead of [97, 32] (2 in all): {COPY}"
    )


def test_unknown_name_in_a_config_is_reported(tmp_path: Path):
    assert refusal(changed(tmp_path, hidden_act="swoosh")) == (
        f"its config.json names 'swoosh', which transformers {VERSION} lacks"
    )
