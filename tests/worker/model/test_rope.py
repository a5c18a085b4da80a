"""Rope: a long request in a batch does not change the rotation of a short one."""

from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from services.worker.model.rope import freeze_rope
from services.worker.requests.types.prompt import SamplingParams
from tests.worker.worker_fixtures import GROUPED, Feeder, make_engine, prompt_tokens, reference

ORIGINAL, LIMIT = 32, 128  # trained and extended context
SCALED = {"rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": ORIGINAL}
ROPES: dict[str, dict[str, Any]] = {
    "yarn": SCALED | {"rope_type": "yarn"},
    "llama3": SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "longrope": SCALED
    | {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]},
}
ASKED = SamplingParams(temperature=0, logprobs=3, ignore_eos=True)


def llama(rope: str) -> PreTrainedModel:
    torch.manual_seed(7)
    sizes = GROUPED | {"max_position_embeddings": LIMIT, "rope_parameters": dict(ROPES[rope])}
    return LlamaForCausalLM(LlamaConfig(**sizes)).eval()


def gemma3(rope: str) -> PreTrainedModel:
    """Rope parameters by type of layer: `rope` is that of the global layers."""
    torch.manual_seed(7)
    ropes = {"sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}}
    config = Gemma3TextConfig(
        **GROUPED | {"max_position_embeddings": LIMIT},
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=ropes | {"full_attention": dict(ROPES[rope])},
    )
    return Gemma3ForCausalLM(config).eval()


def logprobs(feeder: Feeder, request_id: str) -> torch.Tensor:
    drawn = feeder.drawn[request_id]
    return torch.tensor([token.logprobs.top for token in drawn if token.logprobs])


@pytest.mark.parametrize(
    ("make", "rope", "longest"),
    [
        (llama, "yarn", LIMIT),
        (llama, "llama3", LIMIT),
        (llama, "linear", LIMIT),
        (
            llama,
            "dynamic",
            LIMIT,
        ),  # rotations beyond max_position_embeddings, which no request reaches
        (llama, "longrope", ORIGINAL),
        (gemma3, "yarn", LIMIT),
        (gemma3, "longrope", ORIGINAL),
    ],
)
def test_answers_do_not_depend_on_a_long_neighbour(make, rope, longest):
    short, new_tokens = prompt_tokens(1, 9), 12
    alone = Feeder(make_engine(make(rope), max_context_tokens=longest))
    alone.add("short", short, new_tokens, ASKED)
    expected = dict(alone.run())
    together = Feeder(make_engine(make(rope), max_context_tokens=longest))
    together.add("long", prompt_tokens(2, longest - new_tokens), new_tokens, ASKED)
    together.add("short", short, new_tokens, ASKED)
    answers = together.run()
    assert answers["short"] == expected["short"]
    torch.testing.assert_close(
        logprobs(together, "short"), logprobs(alone, "short"), rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("make", [llama, gemma3])
def test_longrope_is_refused_with_an_alternative(make):
    sentence = (
        f"its longrope rope depends on the longest request of a batch beyond {ORIGINAL} tokens, "
        f".*: set max_context_tokens to at most {ORIGINAL}"
    )
    for settings in ({}, {"max_context_tokens": ORIGINAL + 1}):
        with pytest.raises(ValueError, match=sentence):
            make_engine(make("longrope"), **settings)
    engine = make_engine(make("longrope"), max_context_tokens=ORIGINAL)
    assert engine.state.limits.reach_tokens == ORIGINAL


def test_longrope_without_extension_needs_no_cap():
    module = llama("longrope")
    module.config.rope_parameters["original_max_position_embeddings"] = LIMIT
    assert make_engine(module).state.limits.reach_tokens == LIMIT


def test_dynamic_rope_is_refused_above_its_bound():
    freeze_rope(llama("dynamic"), LIMIT)
    with pytest.raises(ValueError, match=f"its dynamic rope .* at most {LIMIT}"):
        freeze_rope(llama("dynamic"), LIMIT + 1)


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frozen_rope_does_not_depend_on_positions(rope):
    """With and without the freeze: transformers changes the rotation of the other requests."""
    near = torch.arange(5)
    beside = torch.cat([near, torch.tensor([2 * LIMIT])])

    def turns(module: PreTrainedModel) -> bool:
        rotary, like = module.model.rotary_emb, torch.zeros(1)
        own, crowded = (rotary(like, x[None])[0][0, : len(near)] for x in (near, beside))
        return not torch.equal(own, crowded)

    assert turns(llama(rope))
    settled = llama(rope)
    freeze_rope(settled, ORIGINAL)
    assert not turns(settled)


def test_context_cap_is_prompt_plus_answer():
    assert make_engine(llama("yarn")).state.limits.reach_tokens == LIMIT
    engine = make_engine(llama("yarn"), max_context_tokens=40)
    assert engine.state.limits.reach_tokens == 40
    assert make_engine(llama("yarn"), max_context_tokens=9_999).state.limits.reach_tokens == LIMIT


def test_static_rope_and_models_without_rope_are_unchanged():
    module = llama("yarn")
    freeze_rope(module, 10 * LIMIT)
    assert module.model.rotary_emb.rope_type == "yarn"
    freeze_rope(reference("gpt2"), 10 * LIMIT)
