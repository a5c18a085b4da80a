"""Small model folders and their expected vectors."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import nn
from transformers import BertConfig, BertModel, DistilBertConfig, DistilBertModel, PreTrainedModel

WORDS = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "write", "a", "poem", "sum", "the", "list", "sea"]


def tokenizer() -> Tokenizer:
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "[UNK]"))
    made.normalizer = normalizers.Lowercase()
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return made


def bert(layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(0)
    return BertModel(
        BertConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=32,
            initializer_range=0.3,
        )
    )


def distilbert() -> PreTrainedModel:
    torch.manual_seed(0)
    return DistilBertModel(
        DistilBertConfig(
            vocab_size=len(WORDS),
            dim=32,
            hidden_dim=64,
            n_layers=2,
            n_heads=4,
            max_position_embeddings=32,
        )
    )


def saved(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def pooled_by(folder: Path, mode: str) -> None:
    """Pooling configuration in the format of sentence-transformers."""
    modules = [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
    ]
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text(json.dumps({f"pooling_mode_{mode}": True}))
    (folder / "modules.json").write_text(json.dumps(modules))


def then_dense(folder: Path, layer: nn.Linear) -> None:
    """A dense layer after pooling, as in LaBSE."""
    sizes = {"in_features": layer.in_features, "out_features": layer.out_features}
    dense = sizes | {"activation_function": "torch.nn.Tanh"}
    (folder / "2_Dense").mkdir()
    (folder / "2_Dense/config.json").write_text(json.dumps(dense))
    weights = {f"linear.{name}": p for name, p in layer.state_dict().items()}
    save_file(weights, folder / "2_Dense/model.safetensors")
    modules = json.loads((folder / "modules.json").read_text())
    modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
    (folder / "modules.json").write_text(json.dumps(modules))


def last_states(model: PreTrainedModel, text: str) -> torch.Tensor:
    ids = torch.tensor([tokenizer().encode(text).ids])
    with torch.inference_mode():
        states: torch.Tensor = model.eval()(ids).last_hidden_state
    return states


def nearly(vector: np.ndarray, expected: torch.Tensor) -> bool:
    return float(vector @ expected.numpy()) / float(expected.norm()) > 0.98


def unit(rows: np.ndarray) -> bool:
    return bool((np.abs(np.linalg.norm(rows, axis=-1) - 1) < 1e-5).all())
