"""The limits of a worker, and the counters of its memory and static batches."""

from dataclasses import dataclass, field

from services.worker.requests.types.lookup import NO_DRAFTS, DraftLimits
from services.worker.requests.types.prompt import Prompt

NO_GRAMMARS = (
    "this worker's engine cannot make answers follow a schema or grammar: leave it out, or use "
    "foretoken's own engine"
)

NO_ADAPTERS = (
    "this worker's engine cannot hold LoRA adapters: use foretoken's own engine, and not an "
    "emulated one"
)


@dataclass(frozen=True)
class Limits:
    """The limits of one replica. `kv_blocks` is the size of the device's pool. `exact_swaps`: KV
    returns from host memory bit for bit."""

    kv_blocks: int
    block_tokens: int = 16
    max_running: int = 256
    max_batch_tokens: int = 512
    max_context_tokens: int = 2**31 - 1
    report_every_steps: int = 16
    eos_ids: frozenset[int] = field(default_factory=frozenset)
    host_blocks: int = 0  # size of the pool in host memory
    exact_swaps: bool = True
    prefix_sharing: bool = True
    # Of prompts and of drafts in one step: every token needs a row of logits.
    max_scored_tokens: int = 256
    drafts: DraftLimits = NO_DRAFTS  # none by default; only where no step is composed ahead
    grammars: bool = False  # whether an answer can be made to follow a grammar
    adapters: bool = False  # whether the engine can hold LoRA adapters
    adapter_slots: int = 0  # adapters on the device at a time
    adapter_turn_steps: int = 1  # that one in use keeps its slot while others wait

    @property
    def reach_tokens(self) -> int:
        """The longest prompt + output of one request."""
        return min(self.kv_blocks * self.block_tokens, self.max_context_tokens)

    def refusal(self, prompt: Prompt) -> str:
        """Why a prompt can never run here; empty if it can."""
        if prompt.sampling.grammar and not self.grammars:
            return NO_GRAMMARS
        if prompt.adapter and not self.adapters:
            return NO_ADAPTERS
        if prompt.total_tokens <= self.reach_tokens:
            return ""
        return (
            f"prompt ({prompt.prompt_tokens}) + max_tokens ({prompt.max_tokens}) exceeds "
            f"{self.reach_tokens} tokens, the longest request that fits"
        )


@dataclass(slots=True)
class Counters:
    """Counters only grow; they count KV tokens, wasted tokens of static batches, or drafts."""

    offloads: int = 0
    offloaded_tokens: int = 0
    uploads: int = 0
    uploaded_tokens: int = 0
    dropped: int = 0  # KV dropped, to be recomputed
    host_full: int = 0  # of those, because host memory was full
    prefix_asked_tokens: int = 0  # of prompts, and of recomputed contexts
    prefix_hit_tokens: int = 0  # of those, found in the prefix cache
    padding_tokens: int = 0  # padding prefilled in static batches
    padding_left_out_tokens: int = 0  # padding omitted for lack of memory or after a failed step
    invalid_tokens: int = 0  # drawn after a member's end
    stray_rows: int = 0  # rows of requests that had ended or left, in a step ahead
    evicted_offloaded: int = 0  # evicted for lack of memory with their KV in host memory
    evicted_dropped: int = 0  # evicted for lack of memory without KV
    drafts: int = 0  # verified
    draft_tokens: int = 0
    accepted_tokens: int = 0  # of those
