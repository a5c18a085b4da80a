"""The demo model's configuration and initial weights."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from models.tokenizer import MAX_LENGTH

HEAD = 32  # width of an attention head
CONSTANT = 0.2  # first value of every embedding, input of the heads that look back
SHARPNESS = 1.2
FREQUENCIES = 5  # fastest rotations, which distinguish adjacent positions


def make_config(tokenizer: PreTrainedTokenizerFast) -> LlamaConfig:
    """Returns the configuration: 1.4 M parameters, 4 query heads over 2 key-value heads."""
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
    """Returns an untrained model; its first two heads attend one and two tokens back.

    Copying needs a head that attends one token back, below a head that attends to an equal token.
    Most of a small model's training passes until the first one emerges. With it, copying is learned
    in about 200 steps. Source: Olsson et al., "In-context Learning and Induction Heads" (2022),
    where smeared keys have the same effect.
    """
    model = LlamaForCausalLM(config).float()
    _look_back(model, head=0, tokens=1)
    _look_back(model, head=1, tokens=2)
    return model


@torch.no_grad()
def _look_back(model: LlamaForCausalLM, head: int, tokens: int) -> None:
    """Makes a query head of the first layer, and its key head, attend `tokens` tokens back.

    Each rotation pair of the query depends on the constant alone and is rotated back by the angle
    of `tokens` positions, so that its product with the key is largest at that distance.
    """
    attention = model.model.layers[0].self_attn
    theta = model.config.rope_parameters["rope_theta"]
    pairs = torch.arange(FREQUENCIES)
    angles = tokens * theta ** (-pairs / (HEAD // 2))
    model.model.embed_tokens.weight[:, 0] = CONSTANT
    query, key = head * HEAD + pairs, pairs
    attention.q_proj.weight[query, 0] = SHARPNESS * angles.cos()
    attention.q_proj.weight[query + HEAD // 2, 0] = -SHARPNESS * angles.sin()
    attention.k_proj.weight[key, 0] = SHARPNESS
    attention.k_proj.weight[key + HEAD // 2, 0] = 0.0
