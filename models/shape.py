"""The demo model's shape and its first weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.tokenizer import MAX_LENGTH

HEAD = 32  # width of an attention head
BEACON = 0.2  # the first value of every embedding: what the heads below find positions by
SHARPNESS = 1.2
FREQUENCIES = 5  # the fastest rotations, which tell neighbours apart


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """The demo model's shape: 1.3 M parameters, 4 query heads over 2 key-value heads."""
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=HEAD,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )


def make_model(config: LlamaConfig) -> LlamaForCausalLM:
    """An untrained model whose first two heads look one and two tokens back.

    Copying needs a head that looks one token back under one that looks for a like token, and
    waiting for the first to appear is most of a small model's training; given it, copying is
    learned in some 200 steps. Source: Olsson et al., "In-context Learning and Induction Heads"
    (2022), where keys smeared over two tokens have the same effect.
    """
    model = LlamaForCausalLM(config).float()
    _look_back(model, head=0, tokens=1)
    _look_back(model, head=1, tokens=2)
    return model


@torch.no_grad()
def _look_back(model: LlamaForCausalLM, head: int, tokens: int) -> None:
    """Turns a query head of the first layer, and its key head, to the token `tokens` before.

    A rotation pair of the query, made from the beacon alone, is set back by the angle that
    `tokens` positions turn it; its product with the key is then largest just there.
    """
    attention = model.model.layers[0].self_attn
    theta = model.config.rope_parameters["rope_theta"]
    pairs = torch.arange(FREQUENCIES)
    angles = tokens * theta ** (-pairs / (HEAD // 2))
    model.model.embed_tokens.weight[:, 0] = BEACON
    query, key = head * HEAD + pairs, pairs
    attention.q_proj.weight[query, 0] = SHARPNESS * angles.cos()
    attention.q_proj.weight[query + HEAD // 2, 0] = -SHARPNESS * angles.sin()
    attention.k_proj.weight[key, 0] = SHARPNESS
    attention.k_proj.weight[key + HEAD // 2, 0] = 0.0
