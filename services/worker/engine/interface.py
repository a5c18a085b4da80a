"""WorkerEngine: what the worker needs of an engine. The real one computes on a device, the emulated
one sleeps; both drive the same `WorkerState`."""

from typing import Protocol

from services.worker.engine.phase_clock import PhaseClock
from services.worker.requests.state import WorkerState
from services.worker.requests.types.batch import StepResult
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.sequence import Sequence


class StepFailed(Exception):
    """A step failed and has no effect; `__cause__` is the error.

    `sequences` are those that the failure ended: the only one of the step. There is none if the
    sequences of the step are computed in parts from now on, or if one of them was evicted.
    """

    def __init__(self, what: str, sequences: list[Sequence]):
        super().__init__(what)
        self.sequences = sequences


class WorkerEngine(Protocol):
    """One model replica, used by one thread at a time. Plans and prompts are applied to `state`
    between two calls of `step`."""

    state: WorkerState
    phases: PhaseClock
    kv_bytes_per_token: int  # over all ranks; 0: unknown
    host_block_bytes: int  # host memory of a block, over all ranks; 0: unknown

    @property
    def placement(self) -> str:
        """What computes, for the log, the ready line and the fleet's view."""

    def enter_thread(self) -> None:
        """Prepares the thread that calls `step`."""

    def add(self, prompt: Prompt, now: float) -> str | None:
        """Adds a prompt. Returns why it can never run here, else None."""

    def step(self) -> StepResult | None:
        """Computes one step and returns its result; None if nothing can run. Raises StepFailed if
        the computation fails; the next call computes a different step."""

    def reset(self) -> None:
        """Drops all requests and pending moves; the step in flight has no effect."""

    def can_compute(self) -> bool:
        """Whether the device can compute anything. This distinguishes a request that fails from a
        broken device."""

    def check(self) -> None:
        """Raises ValueError with a sentence if the replica is lost, even while it is idle. O(1)."""

    def close(self) -> None:
        """Ends other processes of the replica. Idempotent."""
