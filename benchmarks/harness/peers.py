"""The peer in our own process: transformers' continuous batching (`generate_batch`)."""

import time
from collections.abc import Sequence

import torch
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

PAGE_TOKENS = 16  # as our own blocks


class Transformers:
    """A model under `generate_batch`, no slower for want of memory or places."""

    def __init__(self, folder: str, kv_tokens: int, streams: int, dtype: str = "float32"):
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model.eval()
        self._config = ContinuousBatchingConfig(
            page_size=PAGE_TOKENS,
            num_blocks=kv_tokens // PAGE_TOKENS,
            max_batch_tokens=512,
            max_requests_per_batch=streams,
        )

    def tokens_per_s(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> float:
        """All prompts at once, each answered with so many tokens (end of sequence ignored)."""
        generation = GenerationConfig(
            max_new_tokens=output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        began = time.perf_counter()
        answers = self._model.generate_batch(
            [list(prompt) for prompt in prompts],
            generation_config=generation,
            continuous_batching_config=self._config,
        )
        elapsed = time.perf_counter() - began
        made = sum(len(answer.generated_tokens) for answer in answers.values())
        if made != output_tokens * len(prompts):
            raise RuntimeError(f"generate_batch made {made} tokens, not all that were asked for")
        return made / elapsed
