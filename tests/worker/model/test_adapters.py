"""Adapters: logits of merged weights, and what is refused."""

import pytest
import torch

from services.worker.kernels.low_rank import NO_SLOT, AdapterRows, StepAdapters
from services.worker.model.paged import PagedModel
from services.worker.model.probe import Probe
from tests.worker.adapter_files import ALL, merged, random_weights, write_adapter
from tests.worker.worker_fixtures import prompt_tokens, reference

CPU = torch.device("cpu")
PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def load(model: PagedModel, name: str, slot: int, path: str) -> None:
    model.adapters.load(model.adapters.read(name, path))
    model.adapters.place(name, slot)


@pytest.mark.parametrize(
    ("family", "targets", "fuse"),
    [
        ("llama", ALL, True),
        ("llama", ("q_proj", "v_proj"), True),
        ("llama", ALL, False),
        ("qwen3", ("k_proj", "down_proj"), True),
        ("phi3", PHI3, True),
        ("opt", ("q_proj", "fc1", "fc2"), True),
    ],
    ids=str,
)
def test_packed_rows_of_several_adapters_have_logits_of_merged_weights(
    family, targets, fuse, tmp_path
):
    base = reference(family)
    model = PagedModel(merged(base, {}), CPU, fuse)
    model.hold_adapters(3, 3, 8)
    weights = [random_weights(base, seed, rank, targets) for seed, rank in ((1, 4), (2, 8))]
    slot_of = {"": NO_SLOT, "a": 2, "b": 0}
    for name, each in zip("ab", weights, strict=True):
        load(model, name, slot_of[name], write_adapter(tmp_path / name, each))
    model.pack_weights()
    tokens = torch.tensor([prompt_tokens(seed, 6) for seed in range(4)])
    adapters = ["b", "", "a", "b"]
    slots = torch.tensor([slot_of[name] for name in adapters]).repeat_interleave(6)
    rows = torch.tensor([5, 8, 17, 20, 23])
    step = StepAdapters(
        AdapterRows.by_slot(slots.numpy(), CPU), AdapterRows.by_slot(slots[rows].numpy(), CPU)
    )
    positions = torch.arange(6).repeat(4)
    whole = model.forward(
        tokens.flatten(), positions, Probe(4), None, StepAdapters(step.tokens, step.tokens)
    )
    some = model.forward(tokens.flatten(), positions, Probe(4), rows, step)
    by_name = {"": {}, "a": weights[0], "b": weights[1]}
    with torch.inference_mode():
        expected = torch.cat(
            [
                merged(base, by_name[n])(t[None]).logits[0]
                for n, t in zip(adapters, tokens, strict=True)
            ]
        )
    assert (whole - expected).abs().max() < 1e-4
    assert (some - expected[rows]).abs().max() < 1e-4
