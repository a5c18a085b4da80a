"""Families without a fused forward: loaded from a folder, they answer as `generate` does."""

from pathlib import Path

import pytest
import torch

from services.worker.config import EngineConfig
from services.worker.engine.step import Engine
from services.worker.model.paged import PagedModel, load_model
from tests.worker.family_models import FAMILIES, FREQUENT
from tests.worker.worker_fixtures import Feeder, clear_cases, engine_of, reference

LENGTHS = (1, 13, 16, 40)
NEW_TOKENS = 20
BY_FREQUENCY = [
    pytest.param(name, marks=() if name in FREQUENT else pytest.mark.slow) for name in FAMILIES
]
# MoE families with experts in code of their own.
UNGROUPED = ("jetmoe",)


def loaded(name: str, folder: Path) -> PagedModel:
    reference(name).save_pretrained(folder)
    return load_model(str(folder), torch.device("cpu"))


@pytest.mark.parametrize("name", BY_FREQUENCY)
def test_family_equals_generate(name: str, tmp_path: Path):
    """Several prompts in one batch, beyond the window, prefilled in chunks, in slices, and with
    memory for a third of them."""
    cases = clear_cases(name, LENGTHS, NEW_TOKENS)
    expected = {request_id: answer for request_id, (_, answer) in cases.items()}
    assert len({token for answer in expected.values() for token in answer}) >= 8
    settings = EngineConfig(model="", kv_tokens=64, block_tokens=4, max_batch_tokens=11, host_gib=0)
    feeder = Feeder(Engine(loaded(name, tmp_path), settings), slice_tokens=5)
    for request_id, (tokens, _) in cases.items():
        feeder.add(request_id, tokens, NEW_TOKENS)
    assert feeder.run() == expected
    assert feeder.evictions > 0


@pytest.mark.parametrize("name", ["deepseek_v3", "minicpm3"])
def test_latent_attention_fills_values_to_the_size_of_keys(name: str):
    """Keys have 8 + 8 numbers, values 8."""
    model = engine_of(name).model
    assert [(shape.kv_heads, shape.head_dim) for shape in model.shapes] == [(4, 16), (4, 16)]


def test_moe_families_use_the_grouped_product(tmp_path: Path):
    """transformers' default; its alternative is a loop over the experts."""
    moe = [name for name, family in FAMILIES.items() if "num_experts_per_tok" in family.settings]
    for name in moe:
        module = loaded(name, tmp_path / name).module
        used = module.get_experts_implementation()[""]
        assert used == ("eager" if name in UNGROUPED else "grouped_mm"), name
