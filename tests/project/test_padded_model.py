"""The padded demo model: wider, with the same answers."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from foretoken.running.options import demo_model
from models.padded import write_padded


def test_padded_model_has_the_same_logits(tmp_path: Path):
    write_padded(Path(demo_model()), tmp_path / "wide", hidden=256, mlp=768)
    tokens = torch.arange(5, 45)[None]
    logits, padded = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (demo_model(), tmp_path / "wide")
    )
    assert torch.allclose(logits, padded, atol=1e-3)
    assert torch.equal(logits.argmax(-1), padded.argmax(-1))


def test_narrower_sizes_are_an_error(tmp_path: Path):
    with pytest.raises(ValueError, match="is wider than hidden 64 and MLP 2048"):
        write_padded(Path(demo_model()), tmp_path / "narrow", hidden=64)
