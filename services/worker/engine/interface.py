"""WorkerEngine: what the worker needs of an engine. The real one computes on a device, the emulated
one sleeps; both drive the same `WorkerState`. An engine of another project has a state of its own,
with the same effects of prompts and plans."""

from collections.abc import Callable, Collection, Container, Mapping
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager
from typing import Protocol

from services.core import HeldRequest, Plan, Report
from services.worker.engine.phase_clock import PhaseClock
from services.worker.kv.blocks import BlockPool
from services.worker.requests.types.batch import NewToken, StepResult
from services.worker.requests.types.limits import Counters, Limits
from services.worker.requests.types.prompt import Prompt


class FailedRequest(Protocol):
    """A request that a failed step has ended."""

    @property
    def request_id(self) -> str: ...

    @property
    def prompt(self) -> Prompt: ...

    @property
    def output_tokens(self) -> int: ...


class StepFailed(Exception):
    """A step failed and has no effect; `__cause__` is the error.

    `sequences` are those that the failure ended: the only one of the step. There is none if the
    sequences of the step are computed in parts from now on, or if one of them was evicted.
    """

    def __init__(self, what: str, sequences: Seq[FailedRequest]):
        super().__init__(what)
        self.sequences = sequences


class DevicePool(Protocol):
    """The blocks of the device's KV. Free ones are blank, or cached: they still hold a prefix."""

    @property
    def blocks(self) -> int: ...

    @property
    def blank_blocks(self) -> int: ...

    @property
    def cached_blocks(self) -> int: ...

    @property
    def usage(self) -> float: ...

    def blocks_for(self, tokens: int) -> int: ...

    def unpublish_all(self) -> None:
        """Empties the prefix cache."""


class EngineState(Protocol):
    """The requests of an engine, as `WorkerState` documents it."""

    @property
    def limits(self) -> Limits: ...

    @property
    def counters(self) -> Counters: ...

    @property
    def pool(self) -> DevicePool: ...

    @property
    def host(self) -> BlockPool: ...

    @property
    def running(self) -> Mapping[str, object]: ...

    @property
    def busy(self) -> bool: ...

    @property
    def awaited_since_s(self) -> Collection[float]: ...

    @property
    def idle(self) -> bool: ...

    def without_drafts(self) -> AbstractContextManager[None]: ...

    def attach(self) -> tuple[HeldRequest, ...]: ...

    def return_reports(self, reports: Collection[Report]) -> None: ...

    def keep_only(self, origins: Container[str]) -> None: ...

    def apply_plan(self, plan: Plan, now: float) -> None: ...

    def refuse(self, request_id: str) -> None: ...

    def expire(self, now: float) -> None: ...

    def report(self) -> Report | None: ...

    def pop_late(self) -> list[NewToken]: ...

    def check_integrity(self) -> None: ...


class WorkerEngine(Protocol):
    """One model replica, used by one thread at a time. Plans and prompts are applied to `state`
    between two calls of `step`."""

    @property
    def state(self) -> EngineState: ...

    phases: PhaseClock
    kv_bytes_per_token: int  # over all ranks; 0: unknown
    host_block_bytes: int  # host memory of a block, over all ranks; 0: unknown

    @property
    def placement(self) -> str:
        """What computes, for the log, the ready line and the fleet's view."""

    def enter_thread(self) -> None:
        """Prepares the thread that calls `step`."""

    def prepare(self, prompt: Prompt, on_ready: Callable[[], None]) -> bool:
        """Begins what `add` would wait for. Returns whether there is nothing to wait for; else
        another thread calls `on_ready` afterwards."""

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
