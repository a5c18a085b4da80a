"""The limits of a worker."""

from dataclasses import dataclass, field

from services.worker.requests.prompt import Prompt


@dataclass(frozen=True)
class Limits:
    """`kv_blocks * block_tokens` is the device's KV, `host_blocks` the host's. `exact_swaps`: KV
    returns from the host bit for bit."""

    kv_blocks: int
    block_tokens: int = 16
    max_running: int = 256
    max_batch_tokens: int = 512
    max_context_tokens: int = 2**31 - 1
    report_every_steps: int = 16
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    host_blocks: int = 0  # of the same size, in host memory; 0: none
    exact_swaps: bool = True
    prefix_sharing: bool = True
    max_scored_tokens: int = 256  # of prompts in one step; each needs a row of logits

    @property
    def reach_tokens(self) -> int:
        """The longest prompt + output of one request."""
        return min(self.kv_blocks * self.block_tokens, self.max_context_tokens)

    def refusal(self, prompt: Prompt) -> str:
        """Why it can never run here; empty if it can."""
        if prompt.total_tokens <= self.reach_tokens:
            return ""
        return (
            f"prompt ({prompt.prompt_tokens}) + max_tokens ({prompt.max_tokens}) is over "
            f"{self.reach_tokens} tokens, the longest request that fits"
        )
