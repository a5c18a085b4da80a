"""The scheduler's load at one time, as values."""

from dataclasses import dataclass

from services.core import WorkerView


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    view: WorkerView
    running: int
    held_tokens: int  # in blocks in use, from its last report


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers and the queue, for status lines and gateways."""

    workers: tuple[WorkerStatus, ...] = ()
    queued: int = 0
    drain_s: float = 0.0
    policy: str = ""
    prefix_blocks: int = 0  # leading prompt blocks: the scheduler places by their hashes
