"""The engine with the Triton kernels in the interpreter: the same tokens as `generate()`."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.core import Pause, Residency
from tests.worker.worker_fixtures import GROUPED, Feeder, make_engine, prompt_tokens

NEW_TOKENS = 6


@cache
def model() -> LlamaForCausalLM:
    """Heads of 32, the smallest that the kernels support."""
    torch.manual_seed(3)
    return LlamaForCausalLM(LlamaConfig(**{**GROUPED, "hidden_size": 128})).eval()


def answers(prompts: dict[str, tuple[int, ...]]) -> dict[str, list[int]]:
    """Answers of transformers, one at a time; none may depend on rounding."""
    made = {}
    for name, tokens in prompts.items():
        output: Any = model().generate(
            torch.tensor([tokens]), attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
            max_new_tokens=NEW_TOKENS, do_sample=False, output_logits=True,
            return_dict_in_generate=True,
        )  # fmt: skip
        best = torch.cat(output.logits).topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > 1e-3
        made[name] = output.sequences[0, len(tokens) :].tolist()
    return made


PROMPTS = {f"r{i}": prompt_tokens(i, length) for i, length in enumerate((3, 11, 18, 26))}


@pytest.mark.slow
@pytest.mark.parametrize("swap_dtype", ["native", "int8"])
def test_answers_equal_generate_through_chunks_and_swaps(swap_dtype):
    settings = {"kernels": "triton", "block_tokens": 4, "max_batch_tokens": 16}
    feeder = Feeder(make_engine(model(), **settings, host_gib=0.01, swap_dtype=swap_dtype))
    for name, tokens in PROMPTS.items():
        feeder.add(name, tokens, NEW_TOKENS)
    for _ in range(5):
        feeder.step()
    feeder.plan(pause=tuple(Pause(name, Residency.OFFLOAD) for name in ("r1", "r2")))
    feeder.step()
    feeder.engine.state.pool.unpublish_all()
    feeder.plan(admit=tuple(feeder._grant(name) for name in ("r2", "r1")))
    assert feeder.run() == answers(PROMPTS)
    assert feeder.engine.state.counters.uploads == 2


@pytest.mark.slow
def test_int8_cache_answers_equal_the_pytorch_kernels():
    output = {}
    for kernels in ("torch", "triton"):
        settings = {"kernels": kernels, "block_tokens": 4, "max_batch_tokens": 16}
        feeder = Feeder(make_engine(model(), **settings, kv_dtype="int8"))
        for name, tokens in PROMPTS.items():
            feeder.add(name, tokens, NEW_TOKENS)
        output[kernels] = dict(feeder.run())
    assert output["triton"] == output["torch"]
