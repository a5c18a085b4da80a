"""The engine's interface to a replica that spans several processes.

Every rank is an engine over its part of the model and of the KV heads. Rank 0 is the worker: only
rank 0 decides, draws and answers. The other ranks repeat its steps and transfers in the same order,
with the same block ids.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from services.worker.config import EngineConfig
from services.worker.kv.transfers import TransferPlan
from services.worker.machine import select_device
from services.worker.model.tensor_sharding import TensorSharder
from services.worker.requests.types.batch import StepBatch


class RanksApart(ValueError):
    """The ranks have diverged, because one failed or is gone, and the replica is lost. The message
    is a sentence for the user."""


class Ranks:
    """One rank's view of the replica. This class is the only rank of a replica in one process."""

    rank, size = 0, 1
    sharder: TensorSharder | None = None  # keeps this rank's part of the model; None: the whole

    def all_reduce_min(self, number: int) -> int:
        """The smallest value of any rank. All ranks call it and wait for each other."""
        return number

    def run_together(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Within the context, this batch runs on all ranks. Raises RanksApart if it fails on
        one."""
        return _NO_OTHER_RANKS

    def send_moves(self, moves: TransferPlan) -> None:
        """Makes the other ranks start these transfers, too."""

    def send_settled(self, serials: Sequence[int]) -> None:
        """Makes the other ranks wait until these uploads are complete there, too."""

    def send_reset(self) -> None:
        """Makes the other ranks cancel all uploads."""

    def send_adapter_load(self, name: str, path: str) -> None:
        """Makes the other ranks read an adapter, each its part, while steps go on."""

    def send_adapter_placement(self, name: str, slot: int) -> None:
        """Makes the other ranks copy an adapter to a slot, too."""

    def send_adapter_unload(self, name: str) -> None:
        """Makes the other ranks free an adapter."""

    def check(self) -> None:
        """Raises RanksApart if a rank is gone. O(1)."""

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""


_NO_OTHER_RANKS = nullcontext()
SINGLE_RANK = Ranks()


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank: a GPU, adjacent to those of the worker's other ranks, or the CPU. Makes
    it the process's current device, for kernel launches without a device. Raises ValueError with a
    sentence if there is no such GPU."""
    device = select_device(config.device, config.local_rank * config.tensor_parallel + rank)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device
