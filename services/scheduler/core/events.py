"""Events that the scheduler's state takes and actions that it asks for: frozen values, so that a
run can be logged and replayed. `link` names a gateway's Submit stream or a worker's Attach stream.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

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
from services.scheduler.core.phases import Transition, TransitionCause

# Events


@dataclass(frozen=True, slots=True)
class Submitted:
    link: str
    request: Request


@dataclass(frozen=True, slots=True)
class Forecasted:
    """Answers to AskForecast and later improvements; those for ended requests are ignored."""

    forecasts: tuple[tuple[str, Forecast], ...]


@dataclass(frozen=True, slots=True)
class Refreshed:
    """Newer forecasts of whole populations, identified by their `shared_key`."""

    forecasts: tuple[Forecast, ...]


@dataclass(frozen=True, slots=True)
class Cancelled:
    """The gateway ended a request: STOP for a stop string, else CANCELLED."""

    link: str
    request_id: str
    reason: FinishReason
    output_tokens: int


@dataclass(frozen=True, slots=True)
class GatewayLost:
    link: str


@dataclass(frozen=True, slots=True)
class WorkerAttached:
    """A worker's hello; `held` are the requests that it has from before."""

    link: str
    view: WorkerView
    held: tuple[HeldRequest, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkerLost:
    link: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class WorkerDraining:
    """A worker shuts down within `drain_s`."""

    link: str
    worker_id: str
    drain_s: float


@dataclass(frozen=True, slots=True)
class WorkerAlive:
    """A worker that has nothing to report says that it runs."""

    link: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Reported:
    link: str
    worker_id: str
    report: Report


@dataclass(frozen=True, slots=True)
class Costed:
    """A newer cost model of a worker."""

    worker_id: str
    cost: CostModel


@dataclass(frozen=True, slots=True)
class Round:
    """A scheduling round is due. `previous_s` is what the one before it took, for readers of event
    logs."""

    previous_s: float = 0.0


class WorkerDecisionRow(NamedTuple):
    """A worker decision as plain numbers; run, pause and victims are board rows."""

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
    """The batcher's arrangement of a round. `workers` is None when the batcher did not answer in
    time or could not be asked: the scheduler then arranges the round itself."""

    round: int
    workers: tuple[WorkerDecisionRow, ...] | None
    next_s: float = inf
    not_before_s: float = 0.0
    explanations: tuple[WaitExplanationRow, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    notes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tick:
    """A deadline or a timer is due."""


Event = (
    Submitted
    | Forecasted
    | Refreshed
    | Cancelled
    | GatewayLost
    | WorkerAttached
    | WorkerLost
    | WorkerDraining
    | WorkerAlive
    | Reported
    | Costed
    | Round
    | Arranged
    | Tick
)
Dispatch = Callable[[Event], None]

# Actions


@dataclass(frozen=True, slots=True)
class AskForecast:
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class AskArrange:
    """Asks the batcher to arrange the candidates of this round."""

    round: int


@dataclass(frozen=True, slots=True)
class Displace:
    """Ends the stream of a worker because another one attached with its name."""

    link: str
    worker_id: str


@dataclass(frozen=True, slots=True)
class Suspect:
    """A worker is suspected to hang, or no longer."""

    worker_id: str
    suspected: bool


@dataclass(frozen=True, slots=True)
class SendPlan:
    worker_id: str
    link: str
    plan: Plan


class Place(NamedTuple):
    """To the gateway: where to send the prompt. A tuple, because a round may send hundreds."""

    link: str
    request_id: str
    worker_id: str
    address: str
    queued_s: float


@dataclass(frozen=True, slots=True)
class Preempt:
    """To the gateway: no worker runs the request. Not a tuple: it would equal a Resume."""

    link: str
    request_id: str
    output_tokens: int


class Resume(NamedTuple):
    """To the gateway: the worker with the request's tokens runs it again. `held_tokens` of its KV
    are on the device or return from host memory first. A tuple, as Place is."""

    link: str
    request_id: str
    held_tokens: int


@dataclass(frozen=True, slots=True)
class SendForecast:
    """To the gateway, for a request with `include_forecast`: its forecast, the expected `token_s`
    per token while it runs, and once the expected `ttft_s` from its arrival to its first token."""

    link: str
    request_id: str
    forecast: Forecast
    token_s: float
    ttft_s: float | None = None


@dataclass(frozen=True, slots=True)
class SendLengthBound:
    """To the gateway, for a request with a `length_quantile`: that quantile of its forecast, total
    output tokens."""

    link: str
    request_id: str
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Finish:
    link: str
    request_id: str
    reason: FinishReason
    output_tokens: int
    preemptions: int
    queued_s: float
    message: str = ""


@dataclass(frozen=True, slots=True)
class Refuse:
    link: str
    request_id: str
    reject: Reject


@dataclass(frozen=True, slots=True)
class Learn:
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Timed:
    """A static batch has ended at a worker; its timing trains the worker's cost model."""

    worker_id: str
    timing: BatchTiming


GatewayMessage = Place | Preempt | Resume | SendForecast | SendLengthBound | Finish | Refuse
Action = AskForecast | AskArrange | SendPlan | Displace | Suspect | GatewayMessage | Learn | Timed


class Step(NamedTuple):
    """One step of the state, as observers see it once it is done."""

    event: Event
    now: float
    actions: Sequence[Action]
    transitions: Sequence[Transition]
    error: Exception | None = None  # that interrupted the application of the event


def message_about(transition: Transition, link: str, address: str) -> Action | None:
    """The message to a request's gateway about a transition; None if it needs none. `address` is
    that of the transition's worker."""
    t = transition
    match t.cause:
        case TransitionCause.PAUSED:  # the most frequent; the gateway learns that it stopped
            return None
        case TransitionCause.PLACED:
            return Place(link, t.request_id, t.worker_id, address, t.queued_s)
        case _ if t.resumes:
            return Resume(link, t.request_id, t.held_tokens)
        case _ if t.interrupts:
            return Preempt(link, t.request_id, t.output_tokens)
        case TransitionCause.FINISHED:
            reason = FinishReason(t.reason)
            return Finish(
                link, t.request_id, reason, t.output_tokens, t.preemptions, t.queued_s, t.message
            )
        case _:
            return None
