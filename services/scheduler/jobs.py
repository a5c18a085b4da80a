"""What the scheduler remembers of a request and of a worker."""

from dataclasses import dataclass, field
from enum import Enum
from math import inf

from services.core import CostModel, Grant, Pause, Request, WorkerView
from services.forecast import Forecast

Key = tuple[float, ...]


class Phase(Enum):
    FORECASTING = "forecasting"
    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class Rank:
    """Where a job stands among all others: keys ascend, the most urgent first.

    `level` is its priority queue, 0 the most urgent that a remaining time earns; `shift` is how
    far ageing (up, negative) and mispredictions (down) have moved it from the level of its
    `remaining_s`, the fleet's time it still takes. `promised_tokens` is the length it is taken
    to have, `since_s` when it came to wait where it does.
    """

    key: Key
    level: int = 0
    remaining_s: float = 0.0
    shift: int = 0
    promised_tokens: float = 0.0
    since_s: float = inf


UNRANKED = Rank(())


@dataclass(slots=True, eq=False)
class Job:
    """A live request. `home` is the worker that has its tokens, running or not, and holds
    `held_tokens` of its KV, on the device or at rest; `forecast` is as the predictor gave it, not
    yet cut at this request's max_tokens.

    `resumed_seq` is the plan that last let it run again where it was: evictions told before that
    was applied are history.
    """

    request: Request
    link: str
    serial: int
    forecast: Forecast
    rank: Rank = UNRANKED
    phase: Phase = Phase.FORECASTING
    home: str = ""
    output_tokens: int = 0
    held_tokens: int = 0
    limit_tokens: int = 0
    preemptions: int = 0
    resumed_seq: int = 0
    queued_since_s: float = inf
    queued_s: float = 0.0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def resting(self) -> bool:
        """Whether it waits with KV at its home."""
        return self.held_tokens > 0 and self.phase is Phase.QUEUED

    @property
    def context_tokens(self) -> int:
        """What must be held in KV for it to go on."""
        return self.request.prompt_tokens + self.output_tokens

    @property
    def load_tokens(self) -> float:
        """What it holds and is still to make."""
        return self.context_tokens + self.mean_remaining

    @property
    def mean_remaining(self) -> float:
        return self.forecast.mean_remaining(self.output_tokens, self.request.max_tokens)


@dataclass(slots=True, eq=False)
class Draft:
    """Directives gathered during one step, sent as one plan."""

    admit: list[Grant] = field(default_factory=list)
    extend: list[Grant] = field(default_factory=list)
    pause: list[Pause] = field(default_factory=list)
    cancel: list[str] = field(default_factory=list)

    def forget(self, request_id: str) -> None:
        """Cancel it instead of anything else: workers carry out cancels first."""
        for grants in (self.admit, self.extend):
            grants[:] = [grant for grant in grants if grant.request_id != request_id]
        self.pause[:] = [pause for pause in self.pause if pause.request_id != request_id]
        self.cancel.append(request_id)

    def __bool__(self) -> bool:
        return bool(self.admit or self.extend or self.pause or self.cancel)


@dataclass(slots=True, eq=False)
class WorkerJobs:
    """An attached worker and what runs there, in order of admission.

    The scheduler owns `running`; the worker owns memory and says by reports what it holds.
    `pausing` are requests paused by the plan of that seq, until a report says it was applied.
    """

    view: WorkerView
    link: str
    cost: CostModel
    running: dict[str, Job] = field(default_factory=dict)
    draft: Draft = field(default_factory=Draft)
    pausing: dict[str, int] = field(default_factory=dict)
    plan_seq: int = 0
    report_seq: int = 0

    @property
    def held_tokens(self) -> int:
        return sum(job.context_tokens for job in self.running.values())
