"""Small models of every layout that the fused forward supports, and transformers' answers."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from services.worker.model.paged import PagedModel
from tests.worker.worker_fixtures import (
    GROUPED,
    SIZES,
    VOCABULARY,
)

CPU = torch.device("cpu")
TOKENS = 40
LIMIT = SIZES["max_position_embeddings"]
FOUR_LAYERS: dict[str, Any] = GROUPED | {"num_hidden_layers": 4}
HALF_SLIDE: dict[str, Any] = FOUR_LAYERS | {
    "use_sliding_window": True,
    "sliding_window": 7,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def llama(**settings: Any) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**deepcopy(GROUPED | settings)))


def phi3(**settings: Any) -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**deepcopy(GROUPED | settings)))


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": llama,
    "llama, tied": partial(llama, tie_word_embeddings=True),
    "llama, biased": partial(llama, attention_bias=True, mlp_bias=True),
    "llama, no groups": partial(llama, num_key_value_heads=4),
    "llama, wide heads": partial(llama, head_dim=16),
    "llama, linear": partial(
        llama, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    ),
    "llama, llama3": partial(llama, rope_parameters=LLAMA3),
    "llama, yarn": partial(llama, rope_parameters=YARN),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**GROUPED)),
    "qwen2, slides": lambda: Qwen2ForCausalLM(Qwen2Config(**HALF_SLIDE)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GROUPED, head_dim=16)),
    "qwen3, slides": lambda: Qwen3ForCausalLM(
        Qwen3Config(**HALF_SLIDE, head_dim=16, tie_word_embeddings=True, rope_parameters=dict(YARN))
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=None)),
    "mistral, slides": lambda: MistralForCausalLM(MistralConfig(**GROUPED, sliding_window=7)),
    "phi3": phi3,
    "phi3, slides": partial(phi3, sliding_window=7),
    "phi3, turns half": partial(
        phi3,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        },
    ),
}  # fmt: skip


def made(make: Callable[[], PreTrainedModel], dtype: torch.dtype = torch.float32) -> Any:
    """A model with random norms and biases, which are 1 and 0 in a new one."""
    torch.manual_seed(1)
    module: Any = make().eval()
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if weight.ndim == 1:
                weight.normal_(mean=0 if name.endswith("bias") else 1, std=0.3)
    return module.to(dtype)


def random_tokens(start: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (TOKENS,), generator=generator)
    return ids, torch.arange(start, start + TOKENS)


def own_logits(module: Any, ids: Tensor, positions: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(ids[None], position_ids=positions[None], use_cache=False).logits
    return logits[0]


def fused(module: PreTrainedModel) -> PagedModel:
    model = PagedModel(deepcopy(module), CPU)
    assert model.forward_name == "fused forward"
    return model
