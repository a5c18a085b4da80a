"""What can happen to the scheduler, and what it can do: frozen values, so a run can be logged
and replayed. Every request's events carry its gateway's `link`, one a Submit stream."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple

from services.core import (
    FinishReason,
    HeldRequest,
    Outcome,
    Plan,
    Reject,
    Report,
    Request,
    WorkerView,
)
from services.costs import BatchTiming, CostModel
from services.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Submitted:
    link: str
    request: Request
    kind: Literal["submitted"] = "submitted"


@dataclass(frozen=True, slots=True)
class Forecasted:
    """Answers to AskForecast, and better ones that come later: for what still lives."""

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
    """A worker's hello; `held` are the requests it has from before."""

    link: str
    view: WorkerView
    held: tuple[HeldRequest, ...] = ()
    kind: Literal["worker_attached"] = "worker_attached"


@dataclass(frozen=True, slots=True)
class WorkerLost:
    link: str
    worker_id: str
    kind: Literal["worker_lost"] = "worker_lost"


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker is leaving: it goes on for `drain_s` at most."""

    link: str
    worker_id: str
    drain_s: float
    kind: Literal["worker_draining"] = "worker_draining"


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
class Round:
    """Something has changed: decide anew."""

    kind: Literal["round"] = "round"


class Portion(NamedTuple):
    """A share of a decision as plain numbers: all but the worker and the peak are board rows."""

    worker: int
    run: tuple[int, ...]
    limits: tuple[int, ...]
    pause: tuple[int, ...]
    victims: tuple[int, ...]
    peak_tokens: float
    lockstep: bool = False


class WaitExplanationRow(NamedTuple):
    """Why a waiting request is or is not admitted: its board row, a WaitReason and the fields of
    its explanation."""

    row: int
    reason: int
    first_value: float
    second_value: float


@dataclass(frozen=True, slots=True)
class Arranged:
    """What a batcher of its own made of the contest of that round; no portions when it could not
    be asked, or answered too late: the round is then arranged at home."""

    round: int
    portions: tuple[Portion, ...] | None
    next_s: float = inf
    not_before_s: float = 0.0
    explanations: tuple[WaitExplanationRow, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    kind: Literal["arranged"] = "arranged"


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
    | WorkerDraining
    | Reported
    | Costed
    | Round
    | Arranged
    | Tick
)


@dataclass(frozen=True, slots=True)
class AskForecast:
    requests: tuple[Request, ...]
    kind: Literal["ask_forecast"] = "ask_forecast"


@dataclass(frozen=True, slots=True)
class AskArrange:
    """The state's contest is to be arranged by a batcher of its own."""

    round: int
    kind: Literal["ask_arrange"] = "ask_arrange"


@dataclass(frozen=True, slots=True)
class Displace:
    """Another worker has this one's name: end its stream."""

    link: str
    worker_id: str
    kind: Literal["displace"] = "displace"


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
class SendForecast:
    """To a gateway whose client asked: what is foreseen of a request. `token_s` is what a token
    takes it while it runs; `ttft_s` the promise that its first comes so long after its arrival,
    told once."""

    link: str
    request_id: str
    forecast: Forecast
    token_s: float
    ttft_s: float | None = None
    kind: Literal["foretell"] = "foretell"


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


@dataclass(frozen=True, slots=True)
class Timed:
    """A static batch is over at that worker: something for its cost model to learn from."""

    worker_id: str
    timing: BatchTiming
    kind: Literal["timed"] = "timed"


Action = (
    AskForecast
    | AskArrange
    | SendPlan
    | Displace
    | Place
    | Preempt
    | Resume
    | SendForecast
    | Finish
    | Refuse
    | Learn
    | Timed
)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The state of the whole, for status lines and gateways."""

    workers: tuple["WorkerStatus", ...] = ()
    queued: int = 0
    drain_s: float = 0.0
    policy: str = field(default="")
    prefix_blocks: int = 0  # of a prompt whose hashes help to place it


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    view: WorkerView
    running: int
    held_tokens: int  # of the blocks that are in use, by its last report
