"""Containment: an error in the application of a peer's event costs that event, or that peer. Pure.

The event may be half applied. A new request is ended. For any other event, the service ends the
stream that brought it, and the state forgets what the peer has here. Only a consistent state goes
on.
"""

from collections.abc import Callable

from services.core import FinishReason
from services.scheduler.core import events as ev
from services.scheduler.core.failures.consistency import find_breach
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import TransitionCause

# Not rounds and the ends of streams: they are the scheduler's own, and no peer can be forgotten.
CONTAINED = (
    ev.Submitted,
    ev.Forecasted,
    ev.Refreshed,
    ev.Cancelled,
    ev.WorkerAttached,
    ev.WorkerDraining,
    ev.WorkerAlive,
    ev.Reported,
    ev.Costed,
)
CONTAINED_KINDS = tuple(each.__name__ for each in CONTAINED)
SENTENCE = "the scheduler failed to process this request; its log has the reason"


class BrokenState(Exception):
    """An error left a state that must not go on."""


def contain(apply: Callable[[ev.Event], None], event: ev.Event, ledger: Ledger) -> Exception | None:
    """Applies an event; returns the error that interrupted it. Raises BrokenState if the state is
    inconsistent then, and the errors of events that are not contained. O(rows) after an error."""
    try:
        apply(event)
    except Exception as error:
        if not isinstance(event, CONTAINED):
            raise
        if isinstance(event, ev.Submitted):
            _end(event, ledger)
        if breach := find_breach(ledger):
            raise BrokenState(breach) from error
        return error
    return None


def _end(event: ev.Submitted, ledger: Ledger) -> None:
    name, reason = event.request.request_id, FinishReason.ERROR
    if job := ledger.jobs.get(name):
        ledger.drop(job, TransitionCause.FINISHED, reason, SENTENCE)
    else:
        ledger.actions.append(ev.Finish(event.link, name, reason, 0, 0, 0.0, SENTENCE))
