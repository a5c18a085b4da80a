"""What an engine knows of a replica that runs over several processes: almost nothing.

Every rank is an engine over its own part of the model, and of the heads whose KV it keeps. Rank 0
is the worker: it alone decides, draws and answers. The others repeat what it has computed or
moved, in the same order, by block ids that are the same on all of them.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from services.costs import SwapTiming
from services.worker.config import EngineConfig
from services.worker.kv.moves import Moves
from services.worker.machine import device_of
from services.worker.model.part import Part
from services.worker.requests.batch import StepBatch


class RanksApart(ValueError):
    """The ranks no longer do the same, for one of them failed or is gone: the replica is lost.
    The message is a sentence for the user."""


class Moving(Protocol):
    """What the engine asks of its swapper; see there."""

    @property
    def busy(self) -> bool: ...
    def start(self, moves: Moves) -> list[str]: ...
    def settle(self) -> list[int]: ...
    def wait(self) -> None: ...
    def reset(self) -> None: ...
    def take_timings(self) -> list[SwapTiming]: ...


class Ranks(Protocol):
    """One rank's side."""

    rank: int
    size: int

    @property
    def part(self) -> Part | None:
        """Of the model; None where that is all of it."""

    def least(self, number: int) -> int:
        """The smallest that any rank has. All ask, and wait for one another."""

    def moving(self, swapper: Moving) -> Moving:
        """The swapper whose moves the others carry out too. Called once."""

    def together(self, batch: StepBatch) -> AbstractContextManager[None]:
        """Within, this batch runs on all ranks. Raises RanksApart where it fails on one."""

    def check(self) -> None:
        """Raises RanksApart once a rank is gone. Costs nothing."""

    def close(self) -> None:
        """End the others. Again: nothing."""


class Alone:
    """The only rank there is."""

    rank, size = 0, 1
    part = None
    _nothing = nullcontext()

    def least(self, number: int) -> int:
        return number

    def moving(self, swapper: Moving) -> Moving:
        return swapper

    def together(self, batch: StepBatch) -> AbstractContextManager[None]:
        return self._nothing

    def check(self) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """A GPU each, those of one worker side by side; or the CPU. It is made this process's own:
    what names no device, as a kernel's launch, is then on it. Raises ValueError, a sentence."""
    device = device_of(config.device, config.local_rank * config.tensor_parallel + rank)
    if device.index is not None:
        torch.cuda.set_device(device)
    return device
