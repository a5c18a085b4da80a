"""KV transfers between the device and host pools, as values that the swapper carries out."""

from dataclasses import dataclass

from services.costs import Direction


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """One request's KV on its way: device_blocks[i] ↔ host_blocks[i], `tokens` of them filled.

    Logically an offload is over once it is ordered: the device blocks may be reused by whatever
    is computed later, the host blocks read by any later move. An upload is over when the swapper
    says that it arrived; until then nothing reads its device blocks.
    """

    serial: int
    request_id: str
    direction: Direction
    device_blocks: tuple[int, ...]
    host_blocks: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """`recalled` uploads are given up, by serial, before any of `started`: their device blocks
    have another owner now and must not be written any more."""

    started: tuple[KVTransfer, ...] = ()
    recalled: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.started or self.recalled)
