"""What the scheduler remembers of a request and of a worker."""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from services.core import CostModel, Grant, Request, WorkerView
from services.forecast import Forecast


class Phase(Enum):
    FORECASTING = "forecasting"
    QUEUED = "queued"
    RUNNING = "running"


@dataclass(slots=True, eq=False)
class Job:
    """A live request. `home` is the worker that has its tokens, running or not; `forecast` is as
    the predictor gave it, not yet cut at this request's max_tokens."""

    request: Request
    link: str
    serial: int
    forecast: Forecast
    phase: Phase = Phase.FORECASTING
    home: str = ""
    output_tokens: int = 0
    held_tokens: int = 0
    limit_tokens: int = 0
    preemptions: int = 0
    queued_since_s: float = inf
    queued_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def load_tokens(self) -> float:
        """What it holds and is still to make."""
        return self.request.prompt_tokens + self.output_tokens + self.mean_remaining

    @property
    def mean_remaining(self) -> float:
        left = self.request.max_tokens - self.output_tokens
        return min(left, self.forecast.mean_remaining(self.output_tokens)) if left > 0 else 0.0


@dataclass(slots=True, eq=False)
class Draft:
    """Directives gathered during one step, sent as one plan."""

    admit: list[Grant] = field(default_factory=list)
    extend: list[Grant] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.admit or self.extend or self.cancel)


@dataclass(slots=True, eq=False)
class WorkerJobs:
    """An attached worker and what runs there, in order of admission.

    The scheduler owns `running`; the worker owns memory and says by reports what it holds.
    """

    view: WorkerView
    link: str
    cost: CostModel
    running: dict[str, Job] = field(default_factory=dict)
    draft: Draft = field(default_factory=Draft)
    plan_seq: int = 0
    report_seq: int = 0

    @property
    def held_tokens(self) -> int:
        return sum(job.request.prompt_tokens + job.output_tokens for job in self.running.values())
