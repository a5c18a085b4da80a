"""What the gateway knows of the workers: the scheduler's last FleetView. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from gateway.requests.parser import Generation, Reach
from protos.generated import scheduler_pb2
from services.runtime.prefix import encode_hashes, prompt_hashes

MOST_BLOCKS = 256  # of a prompt that are hashed, whatever is asked for: a quarter of a millisecond


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers in service, and how full they and their queue were when the scheduler last told."""

    addresses: Collection[str] = ()
    reach: Reach | None = None  # None while there is no worker
    running: int = 0
    queued: int = 0
    drain_s: float = 0.0
    block_tokens: int = 0  # of every worker's cache; 0 where they differ, or none says so
    prefix_blocks: int = 0  # of a prompt whose hashes help the scheduler to place it
    told_s: float = 0.0  # on the gateway's clock

    def hashes_of(self, generation: Generation) -> bytes:
        """How a prompt begins, as the scheduler asks to be told: empty where it does not."""
        if not (self.prefix_blocks and self.block_tokens):
            return b""
        salt, most = generation.cache_salt, min(self.prefix_blocks, MOST_BLOCKS)
        return encode_hashes(prompt_hashes(generation.prompt_ids, most, self.block_tokens, salt))

    def reach_or(self, context_tokens: int) -> Reach:
        """The fleet's reach; without one, the model's own, else nothing bounds a request yet."""
        return self.reach or Reach(context_tokens or 2**31 - 1, "the model")

    def drain_left_s(self, now_s: float) -> float:
        """Until the queue is empty. It wears off: a queue of which nothing more is told must not
        refuse requests for ever."""
        return max(0.0, self.drain_s - max(0.0, now_s - self.told_s))

    @property
    def backed_up(self) -> bool:
        """Whether more wait than run. Fewer may only be waiting for the next round, and then the
        time until all is done says little about when they start."""
        return self.queued > self.running


def read_fleet(view: scheduler_pb2.FleetView, now_s: float) -> Fleet:
    """The longest request that some worker can hold, and whether its cache or model bounds it."""
    blocks = {worker.block_tokens for worker in view.workers}
    reaches = [
        Reach(worker.kv_tokens, "the cache")
        if worker.kv_tokens < worker.max_context_tokens
        else Reach(worker.max_context_tokens, "the model")
        for worker in view.workers
    ]
    longest = max(reaches, key=lambda reach: reach.tokens, default=None)
    addresses = frozenset(worker.address for worker in view.workers)
    running = sum(worker.running for worker in view.workers)
    return Fleet(
        addresses,
        longest,
        running,
        view.queued,
        view.drain_s,
        blocks.pop() if len(blocks) == 1 else 0,
        view.prefix_blocks,
        now_s,
    )
