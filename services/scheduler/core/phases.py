"""The phases of a request in the scheduler, and every legal change between them.

    NONE ─▶ FORECASTING ─▶ QUEUED ⇄ RUNNING ─▶ NONE
                 └─▶ AWAITING_WORKER ─┴─────────┘

The ledger is the only component that changes a phase. Each change is a `Transition`, which metrics,
spans, the event log and stories consume. A cause may leave the phase as it is: it then tells
observers, and often the gateway, something that the phase alone does not.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from itertools import product
from typing import NamedTuple


class RequestPhase(IntEnum):
    """The value of the board's `phase` column."""

    __hash__ = int.__hash__  # that of an enum is a function in Python

    NONE = 0  # not submitted, or ended: a free row of the board
    FORECASTING = 1  # waits for its first forecast
    AWAITING_WORKER = 2  # its gateway names a worker that has not attached yet
    QUEUED = 3
    RUNNING = 4


class TransitionCause(StrEnum):
    __hash__ = str.__hash__

    ARRIVED = "arrived"
    REFUSED = "refused"
    REJOINED = "rejoined"  # its gateway submits it again and both keep the request as it is
    SUPERSEDED = "superseded"  # submitted again on another stream; the earlier record is dropped
    AWAITED = "awaited"
    NOT_HELD = "not_held"  # the worker that its gateway names does not have it
    ADOPTED = "adopted"  # the worker has it from before and keeps it
    ENQUEUED = "enqueued"  # its forecast is known, or the scheduler no longer waits for it
    PLACED = "placed"  # admitted at a worker that must receive its tokens
    RESUMED = "resumed"  # admitted at the worker that has its tokens
    PAUSED = "paused"  # by a plan; the worker has not stopped it yet
    STOPPED = "stopped"  # the worker has stopped a paused request, or lost it
    EVICTED = "evicted"  # by its worker, for lack of memory
    LOST = "lost"  # its worker is gone
    FINISHED = "finished"  # by its worker's report, or at its deadline
    CANCELLED = "cancelled"
    GATEWAY_LOST = "gateway_lost"


class Transition(NamedTuple):
    """One change of a request, with all that its observers need."""

    request_id: str
    before: RequestPhase
    after: RequestPhase
    cause: TransitionCause
    at_s: float
    worker_id: str = ""  # the worker that has the request's tokens after it, or had them before
    output_tokens: int = 0
    held_tokens: int = 0  # tokens in KV at that worker
    reason: str = ""  # FinishReason or RejectReason
    message: str = ""  # the sentence for the user
    queued_s: float = 0.0  # time in the queue so far
    preemptions: int = 0  # so far

    @property
    def resumes(self) -> bool:
        """Whether the worker that has the request's tokens runs it from now on."""
        return self.cause in _RESUMES and self.after is RequestPhase.RUNNING

    @property
    def interrupts(self) -> bool:
        """Whether the request waits and its gateway must know that no worker runs it."""
        return self.cause in _INTERRUPTS and self.after is not RequestPhase.RUNNING


class IllegalTransition(Exception):
    """A defect of the scheduler: no event leads from this phase to that one."""


_P, _C = RequestPhase, TransitionCause
_RESUMES = frozenset({_C.RESUMED, _C.ADOPTED, _C.REJOINED})
_INTERRUPTS = frozenset({_C.ADOPTED, _C.REJOINED, _C.NOT_HELD, _C.STOPPED, _C.EVICTED, _C.LOST})
_LIVE = frozenset(_P) - {_P.NONE}
_WAITING = _LIVE - {_P.RUNNING}

Change = tuple[RequestPhase, RequestPhase]


def _stays(phases: frozenset[RequestPhase]) -> frozenset[Change]:
    return frozenset((phase, phase) for phase in phases)


LEGAL: Mapping[TransitionCause, frozenset[Change]] = {
    _C.ARRIVED: frozenset({(_P.NONE, _P.FORECASTING)}),
    _C.REFUSED: frozenset({(_P.NONE, _P.NONE), *product(_WAITING, (_P.NONE,))}),
    _C.REJOINED: _stays(_LIVE),
    _C.SUPERSEDED: frozenset(product(_LIVE, (_P.NONE,))),
    _C.AWAITED: frozenset({(_P.FORECASTING, _P.AWAITING_WORKER)}),
    _C.NOT_HELD: frozenset({(_P.FORECASTING, _P.FORECASTING), (_P.AWAITING_WORKER, _P.QUEUED)}),
    _C.ADOPTED: frozenset(product(_WAITING, (_P.QUEUED, _P.RUNNING))),
    _C.ENQUEUED: frozenset({(_P.FORECASTING, _P.QUEUED)}),
    _C.PLACED: frozenset({(_P.QUEUED, _P.RUNNING)}),
    _C.RESUMED: frozenset({(_P.QUEUED, _P.RUNNING)}),
    _C.PAUSED: frozenset({(_P.RUNNING, _P.QUEUED)}),
    _C.STOPPED: _stays(frozenset({_P.QUEUED})),
    _C.EVICTED: frozenset({(_P.RUNNING, _P.QUEUED)}),
    _C.LOST: frozenset({(_P.RUNNING, _P.QUEUED)}),
    _C.FINISHED: frozenset(product(_LIVE, (_P.NONE,))),
    _C.CANCELLED: frozenset(product(_LIVE, (_P.NONE,))),
    _C.GATEWAY_LOST: frozenset(product(_LIVE, (_P.NONE,))),
}


def require_legal(
    request_id: str, before: RequestPhase, after: RequestPhase, cause: TransitionCause
) -> None:
    """Raises IllegalTransition. O(1)."""
    if (before, after) not in LEGAL[cause]:
        raise IllegalTransition(f"{request_id}: {before.name} → {after.name} by {cause.value}")
