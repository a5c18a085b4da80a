"""KV transfers between the device and host pools, as values that the swapper carries out."""

from dataclasses import dataclass

from services.costs import Direction


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """Transfer of one request's KV: device_blocks[i] ↔ host_blocks[i], `tokens` of them filled.

    An offload counts as complete once issued: later compute may reuse its device blocks, and later
    transfers may read its host blocks. An upload is complete when the swapper reports its arrival;
    until then nothing reads its device blocks.
    """

    serial: int
    request_id: str
    direction: Direction
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Transfers to start, after cancelling the uploads `recalled` (by serial).

    The device blocks of a recalled upload have a new owner and must not be written any more."""

    started: tuple[KVTransfer, ...] = ()
    recalled: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.started or self.recalled)
