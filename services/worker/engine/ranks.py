"""The engine's interface to a replica that spans several processes.

Every rank is an engine over its part of the model and of the KV heads. Rank 0 is the worker: it
alone decides, draws and answers. The other ranks repeat its steps and moves in the same order, with
the same block ids.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from services.costs import SwapTiming
from services.worker.config import EngineConfig
from services.worker.kv.transfers import TransferPlan
from services.worker.machine import device_of
from services.worker.model.sharding import ModelSharder
from services.worker.requests.types.batch import StepBatch


class RanksApart(ValueError):
    """The ranks have diverged, because one failed or is gone: the replica is lost. The message is a
    sentence for the user."""


class SwapperInterface(Protocol):
    """The engine's view of its swapper; see there."""

    @property
    def busy(self) -> bool: ...
    def start(self, moves: TransferPlan) -> list[str]: ...
    def settle(self) -> list[int]: ...
    def wait(self) -> None: ...
    def reset(self) -> None: ...
    def take_timings(self) -> list[SwapTiming]: ...


class Ranks(Protocol):
    """One rank's side of the replica."""

    rank: int
    size: int

    @property
    def part(self) -> ModelSharder | None:
        """This rank's part of the model; None for the whole model."""

    def least(self, number: int) -> int:
        """The smallest value of any rank. All ranks call it and wait for each other."""

    def wrap_swapper(self, swapper: SwapperInterface) -> SwapperInterface:
        """The swapper whose moves the other ranks repeat. Called once."""

    def together(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Within the context, this batch runs on all ranks. Raises RanksApart if it fails on
        one."""

    def check(self) -> None:
        """Raises RanksApart if a rank is gone. O(1)."""

    def close(self) -> None:
        """Ends the other ranks. Idempotent."""


class Alone:
    """The only rank of a replica in one process."""

    rank, size = 0, 1
    part = None
    _nothing = nullcontext()

    def least(self, number: int) -> int:
        return number

    def wrap_swapper(self, swapper: SwapperInterface) -> SwapperInterface:
        return swapper

    def together(self, batch: StepBatch) -> AbstractContextManager[None]:
        return self._nothing

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """One GPU per rank, adjacent for the ranks of one worker; or the CPU. Sets the process's
    current device, so that kernel launches without a device use it. Raises ValueError with a
    sentence."""
    device = device_of(config.device, config.local_rank * config.tensor_parallel + rank)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device
