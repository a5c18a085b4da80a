"""The gateway's view of the workers: the scheduler's last FleetView. Pure."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.types.generation import ContextLimit, GenerationRequest
from protos.generated import scheduler_pb2
from services.runtime.prefix import encode_hashes, key_salt, prompt_hashes

MAX_PREFIX_BLOCKS = 256  # hashed per prompt, whatever the scheduler requests: about 0.25 ms
NO_LIMIT_TOKENS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a model in service, and the load as of the scheduler's last report."""

    addresses: Mapping[str, int] = field(default_factory=dict)  # with the epoch of its process
    other_models: Collection[str] = ()  # of the scheduler's other workers
    context_limit: ContextLimit | None = None  # None without a worker
    running: int = 0
    queued: int = 0
    drain_s: float = 0.0  # until the queue is empty, estimated
    block_tokens: int = 0  # of every worker's cache; 0 if they differ or are unknown
    prefix_blocks: int = 0  # leading prompt blocks: the scheduler places by their hashes
    reported_s: float = 0.0  # on the gateway's clock
    # The folder of each LoRA adapter that all workers of the model hold, by name; None without a
    # worker.
    adapters: Mapping[str, str] | None = None
    warnings: Sequence[str] = ()  # what does not work, although requests are served

    def prefix_hashes(self, request: GenerationRequest) -> bytes:
        """Hashes of the prompt's first blocks; empty if the scheduler does not use them."""
        if not (self.prefix_blocks and self.block_tokens):
            return b""
        blocks = min(self.prefix_blocks, MAX_PREFIX_BLOCKS)
        salt = key_salt(request.prefix_salt, request.client.adapter)
        return encode_hashes(prompt_hashes(request.prompt_ids, blocks, self.block_tokens, salt))

    def context_limit_or(self, context_tokens: int) -> ContextLimit:
        """The fleet's limit; without workers the model's `context_tokens`, or none for 0."""
        return self.context_limit or ContextLimit(context_tokens or NO_LIMIT_TOKENS, "the model")

    def drain_left_s(self, now_s: float) -> float:
        """Seconds until the queue is empty. Decreases with the report's age, so that an outdated
        report does not refuse requests forever."""
        return max(0.0, self.drain_s - max(0.0, now_s - self.reported_s))

    @property
    def backed_up(self) -> bool:
        """Whether more requests wait than run. Fewer may only wait for the next round, so that the
        drain time says little about when they start."""
        return self.queued > self.running


def read_fleet(view: scheduler_pb2.FleetView, model: str, now_s: float) -> Fleet:
    """The fleet of a report for requests to `model`. Its context limit is that of the worker with
    the longest one."""
    workers = [worker for worker in view.workers if worker.model == model]
    adapters = {each.name: each.path for each in view.adapters if each.model == model}
    blocks = {worker.block_tokens for worker in workers}
    limits = [
        ContextLimit(worker.kv_tokens, "the cache")
        if worker.kv_tokens < worker.max_context_tokens
        else ContextLimit(worker.max_context_tokens, "the model")
        for worker in workers
    ]
    return Fleet(
        addresses={worker.address: worker.epoch for worker in workers},
        other_models=frozenset(worker.model for worker in view.workers) - {model},
        context_limit=max(limits, key=lambda limit: limit.tokens, default=None),
        running=sum(worker.running for worker in workers),
        queued=view.queued,
        drain_s=view.drain_s,
        block_tokens=blocks.pop() if len(blocks) == 1 else 0,
        prefix_blocks=view.prefix_blocks,
        reported_s=now_s,
        adapters=adapters if workers else None,
        warnings=tuple(view.warnings),
    )
