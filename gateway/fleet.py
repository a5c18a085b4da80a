"""What the gateway knows of the workers: the scheduler's last FleetView. Pure."""

from collections.abc import Collection
from dataclasses import dataclass

from gateway.request import Reach
from protos import scheduler_pb2


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers in service, and how long their queue is."""

    addresses: Collection[str] = ()
    reach: Reach | None = None  # None while there is no worker
    drain_s: float = 0.0

    def reach_or(self, context_tokens: int) -> Reach:
        """The fleet's reach; without one, the model's own, else nothing bounds a request yet."""
        return self.reach or Reach(context_tokens or 2**31 - 1, "the model")


def read_fleet(view: scheduler_pb2.FleetView) -> Fleet:
    """The longest request that some worker can hold, and whether its cache or model bounds it."""
    reaches = [
        Reach(worker.kv_tokens, "the cache")
        if worker.kv_tokens < worker.max_context_tokens
        else Reach(worker.max_context_tokens, "the model")
        for worker in view.workers
    ]
    longest = max(reaches, key=lambda reach: reach.tokens, default=None)
    return Fleet(frozenset(w.address for w in view.workers), longest, view.drain_s)
