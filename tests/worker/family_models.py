"""One small model of each further family that is served with transformers' forward, as settings of
its config beside the common ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]

SLIDES: Settings = {"sliding_window": 7}
WIDE: Settings = {"head_dim": 16}
UNTIED: Settings = {"tie_word_embeddings": False}  # tied, a random model repeats its last token
MIXED: Settings = {
    **UNTIED,
    "num_hidden_layers": 4,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
EXPERTS: Settings = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
ROUTED: Settings = {
    **EXPERTS,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
LATENT: Settings = {  # keys have 16 numbers, values 8
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
LOCAL_EXPERTS: Settings = {"num_local_experts": 8, "num_experts_per_tok": 2}
SHARED_KV: Settings = {**WIDE, **MIXED, "num_kv_shared_layers": 2}
GEMMA3: Settings = {**WIDE, **MIXED, "query_pre_attn_scalar": 16}
PER_LAYER: Settings = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96}
VISION: Settings = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "image_size": 28,
    "patch_size": 14,
}


@dataclass(frozen=True)
class Family:
    """`model_type` is transformers' name. With sections `beside` it, `settings` are those of its
    text part."""

    model_type: str
    settings: Settings = field(default_factory=dict)
    beside: Settings = field(default_factory=dict)


FAMILIES: dict[str, Family] = {
    "cohere": Family("cohere"),
    "cohere2": Family("cohere2", MIXED),
    "deepseek_v2": Family("deepseek_v2", {**LATENT, **ROUTED, "topk_method": "greedy"}),
    "deepseek_v3": Family("deepseek_v3", {**LATENT, **ROUTED}),
    "ernie4_5": Family("ernie4_5", {"head_dim": 8}),
    "exaone4": Family("exaone4", MIXED),
    "gemma": Family("gemma", WIDE),
    "gemma3": Family("gemma3_text", GEMMA3),
    "gemma3, multimodal": Family("gemma3", GEMMA3, {"vision_config": VISION, **UNTIED}),
    "gemma3n": Family(
        "gemma3n_text",
        {**SHARED_KV, **PER_LAYER, "laurel_rank": 4, "activation_sparsity_pattern": None},
    ),
    "gemma4": Family("gemma4_text", {**SHARED_KV, **PER_LAYER, "global_head_dim": 32}),
    "glm": Family("glm", {"head_dim": 8}),
    "glm4": Family("glm4", {"head_dim": 8}),
    "glm4_moe": Family("glm4_moe", {**WIDE, **ROUTED, "n_group": 1}),
    "granite": Family(
        "granite",
        {
            "embedding_multiplier": 2.0,
            "logits_scaling": 2.0,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.2,
        },
    ),
    "granitemoe": Family("granitemoe", {**LOCAL_EXPERTS, "attention_multiplier": 0.3}),
    "hunyuan": Family("hunyuan_v1_dense", {"head_dim": 8}),
    "jetmoe": Family("jetmoe", {**LOCAL_EXPERTS, "kv_channels": 8}),
    "minicpm3": Family("minicpm3", {**LATENT, **UNTIED}),
    "minimax_m2": Family("minimax_m2", {**LOCAL_EXPERTS, "head_dim": 8}),
    "ministral3": Family("ministral3", {"head_dim": 8}),
    "mixtral": Family("mixtral", {**LOCAL_EXPERTS, **SLIDES}),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "olmo3": Family("olmo3", MIXED),
    "olmoe": Family("olmoe", {"num_experts": 8, "num_experts_per_tok": 2}),
    "phimoe": Family("phimoe", LOCAL_EXPERTS),
    "qwen2_moe": Family(
        "qwen2_moe", {**EXPERTS, "num_experts": 8, "shared_expert_intermediate_size": 32}
    ),
    "qwen3_moe": Family("qwen3_moe", {**WIDE, **EXPERTS, "num_experts": 8}),
    "seed_oss": Family("seed_oss", {"head_dim": 8}),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0]}),
    "starcoder2": Family("starcoder2", SLIDES),
}
# Tested in every run; the others are slow tests.
FREQUENT = (
    "deepseek_v2",
    "deepseek_v3",
    "gemma3",
    "glm4",
    "granite",
    "mixtral",
    "olmo2",
    "qwen3_moe",
)
