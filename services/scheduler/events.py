"""What can happen to the scheduler, and what it can do: frozen values, so a run can be logged
and replayed. Every request's events carry its gateway's `link`, one a Submit stream."""

from dataclasses import dataclass, field
from typing import Literal

from services.core import (
    CostModel,
    FinishReason,
    Outcome,
    Plan,
    Reject,
    Report,
    Request,
    WorkerView,
)
from services.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Submitted:
    link: str
    request: Request
    kind: Literal["submitted"] = "submitted"


@dataclass(frozen=True, slots=True)
class Forecasted:
    """Answers to AskForecast, one a request."""

    forecasts: tuple[tuple[str, Forecast], ...]
    kind: Literal["forecasted"] = "forecasted"


@dataclass(frozen=True, slots=True)
class Refreshed:
    """Newer forecasts of whole populations, by their shared_key."""

    forecasts: tuple[Forecast, ...]
    kind: Literal["refreshed"] = "refreshed"


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The gateway ended it: STOP when a stop string did, else CANCELLED."""

    link: str
    request_id: str
    reason: FinishReason
    output_tokens: int
    kind: Literal["cancelled"] = "cancelled"


@dataclass(frozen=True, slots=True)
class GatewayLost:
    link: str
    kind: Literal["gateway_lost"] = "gateway_lost"


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    link: str
    view: WorkerView
    kind: Literal["worker_attached"] = "worker_attached"


@dataclass(frozen=True, slots=True)
class WorkerLost:
    link: str
    worker_id: str
    kind: Literal["worker_lost"] = "worker_lost"


@dataclass(frozen=True, slots=True)
class Reported:
    link: str
    worker_id: str
    report: Report
    kind: Literal["reported"] = "reported"


@dataclass(frozen=True, slots=True)
class Costed:
    worker_id: str
    cost: CostModel
    kind: Literal["costed"] = "costed"


@dataclass(frozen=True, slots=True)
class Batch:
    """The batcher's word for one worker: the first `admit` of what it was offered."""

    worker_id: str
    admit: int
    peak_tokens: float = 0.0
    wait_reason: str = ""


@dataclass(frozen=True, slots=True)
class Formed:
    """The answer to AskBatch of that round; empty when the batcher could not be asked."""

    round: int
    batches: tuple[Batch, ...]
    kind: Literal["formed"] = "formed"


@dataclass(frozen=True, slots=True)
class Draining:
    """Take no more requests; go on with those there are."""

    kind: Literal["draining"] = "draining"


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: deadlines are looked at, and who has waited long enough moves up."""

    kind: Literal["tick"] = "tick"


Event = (
    Submitted
    | Forecasted
    | Refreshed
    | Cancelled
    | GatewayLost
    | WorkerAttached
    | WorkerLost
    | Reported
    | Costed
    | Formed
    | Draining
    | Tick
)


@dataclass(frozen=True, slots=True)
class AskForecast:
    requests: tuple[Request, ...]
    kind: Literal["ask_forecast"] = "ask_forecast"


@dataclass(frozen=True, slots=True)
class Columns:
    """Requests as the batcher sees them, a row each; `forecast` indexes the round's table."""

    prompt_tokens: tuple[int, ...] = ()
    output_tokens: tuple[int, ...] = ()
    max_tokens: tuple[int, ...] = ()
    forecast: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Group:
    worker_id: str
    kv_tokens: int
    max_running: int
    running: Columns
    queued: Columns


@dataclass(frozen=True, slots=True)
class AskBatch:
    round: int
    policy: str
    params: dict[str, float]
    forecasts: tuple[Forecast, ...]
    groups: tuple[Group, ...]
    kind: Literal["ask_batch"] = "ask_batch"


@dataclass(frozen=True, slots=True)
class SendPlan:
    worker_id: str
    link: str
    plan: Plan
    kind: Literal["send_plan"] = "send_plan"


@dataclass(frozen=True, slots=True)
class Place:
    """Tell the gateway where to send the prompt."""

    link: str
    request_id: str
    worker_id: str
    address: str
    queued_s: float
    kind: Literal["place"] = "place"


@dataclass(frozen=True, slots=True)
class Preempt:
    link: str
    request_id: str
    output_tokens: int
    kind: Literal["preempt"] = "preempt"


@dataclass(frozen=True, slots=True)
class Resume:
    """Admitted again at the worker that has its tokens, and `held_tokens` of its KV: on the
    device, or in host memory, from where they come back first."""

    link: str
    request_id: str
    held_tokens: int
    kind: Literal["resume"] = "resume"


@dataclass(frozen=True, slots=True)
class Finish:
    link: str
    request_id: str
    reason: FinishReason
    output_tokens: int
    preemptions: int
    queued_s: float
    message: str = ""
    kind: Literal["finish"] = "finish"


@dataclass(frozen=True, slots=True)
class Refuse:
    link: str
    request_id: str
    reject: Reject
    kind: Literal["refuse"] = "refuse"


@dataclass(frozen=True, slots=True)
class Learn:
    outcome: Outcome
    kind: Literal["learn"] = "learn"


Action = AskForecast | AskBatch | SendPlan | Place | Preempt | Resume | Finish | Refuse | Learn


@dataclass(frozen=True, slots=True)
class Fleet:
    """The state of the whole, for status lines and gateways."""

    workers: tuple["WorkerStatus", ...] = ()
    queued: int = 0
    drain_s: float = 0.0
    policy: str = field(default="")


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    view: WorkerView
    running: int
    held_tokens: int
