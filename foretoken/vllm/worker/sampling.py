"""How tokens are drawn, in vLLM's terms. Imports no vLLM."""

from collections.abc import Iterable
from typing import Any

from services.worker.requests.types.prompt import Prompt, SamplingParams

SEED = "foretoken_seed"  # key of `extra_args`, for a model runner without seeds by position
SEED_BITS = (1 << 63) - 1  # vLLM keeps seeds as signed integers
MASK = (1 << 64) - 1


def sampling_arguments(
    prompt: Prompt, eos_ids: Iterable[int], seeds_by_position: bool
) -> dict[str, Any]:
    """Arguments of vLLM's SamplingParams for a prompt. End tokens are given as stop tokens, which
    vLLM, too, does not draw before `min_tokens`. `seeds_by_position`: the model runner draws each
    token by seed and position; else runner_extension.py does."""
    sampling = prompt.sampling
    stops = set(sampling.stop_token_ids)
    if not sampling.ignore_eos or sampling.grammar:  # nothing can follow a complete grammar
        stops.update(eos_ids)
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        # With a grammar, grammars.py masks the end.
        "min_tokens": 0 if sampling.grammar else min(sampling.min_tokens, prompt.max_tokens),
        "max_tokens": prompt.max_tokens,
        "ignore_eos": True,
        "stop_token_ids": sorted(stops),
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logprobs": sampling.logprobs,
        # A request with output has received its scores before.
        "prompt_logprobs": None if prompt.delivered_tokens else sampling.prompt_logprobs,
        "logit_bias": dict(sampling.logit_bias) or None,
        "allowed_token_ids": list(sampling.allowed_token_ids) or None,
        "detokenize": False,
    } | _seed(sampling, seeds_by_position)


def _seed(sampling: SamplingParams, by_position: bool) -> dict[str, Any]:
    if sampling.temperature == 0.0:
        return {}
    seed = sampling.seed & SEED_BITS
    return {"seed": seed} if by_position else {"extra_args": {SEED: seed}}


def draw_seed(seed: int, position: int) -> int:
    """The seed of one draw: a function of the request's seed and the number of its output tokens.
    SplitMix64 (Steele et al., OOPSLA 2014), because a CPU's generator reads the lower 32 bits
    only."""
    mixed = (seed + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return (mixed ^ (mixed >> 31)) & SEED_BITS
