"""SwapLinks: when KV transfers end, by a cost model. Pure.

The simulator and the emulated engine have them in place of a device's copy engines.
"""

from dataclasses import dataclass

from services.costs import CostModel, Direction
from services.worker.kv.transfers import KVTransfer, TransferPlan


@dataclass(frozen=True, slots=True)
class TimedCopy:
    """A transfer on its link, which it occupies from `start_s` to `end_s`."""

    transfer: KVTransfer
    start_s: float
    end_s: float


class SwapLinks:
    """The copy engines of one device: one direction each, one transfer after another."""

    def __init__(self, cost: CostModel):
        self._cost = cost
        self._free_s = {Direction.OFFLOAD: 0.0, Direction.UPLOAD: 0.0}
        self._stored_s: dict[str, float] = {}  # when a request's KV has reached host memory

    def start(self, plan: TransferPlan, now: float) -> list[TimedCopy]:
        """Queues the transfers; returns when each begins and ends. An upload waits until its KV has
        reached host memory. O(transfers, and offloads in progress)."""
        copies = []
        # Earlier ends delay nothing, and a request that leaves never uploads its KV.
        self._stored_s = {name: end_s for name, end_s in self._stored_s.items() if end_s > now}
        for transfer in plan.started:
            start_s = max(now, self._free_s[transfer.direction])
            match transfer.direction:
                case Direction.OFFLOAD:
                    end_s = start_s + transfer.tokens * self._cost.offload_token_s
                    self._stored_s[transfer.request_id] = end_s
                case Direction.UPLOAD:
                    start_s = max(start_s, self._stored_s.pop(transfer.request_id, 0.0))
                    end_s = start_s + transfer.tokens * self._cost.upload_token_s
            copies.append(TimedCopy(transfer, start_s, end_s))
            self._free_s[transfer.direction] = end_s
        return copies

    def device_s(self, plan: TransferPlan) -> float:
        """The device's own part of the transfers, which delays the step."""
        return sum(t.tokens for t in plan.started) * self._cost.quantize_token_s / 2
