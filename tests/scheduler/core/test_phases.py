"""The table of legal transitions: every other change of a request's phase raises."""

from itertools import product

import pytest

from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import (
    LEGAL,
    IllegalTransition,
    RequestPhase,
    Transition,
    TransitionCause,
    require_legal,
)
from tests.scheduler.state_driver import request


@pytest.mark.parametrize("cause", TransitionCause)
def test_only_changes_of_the_table_are_legal(cause: TransitionCause) -> None:
    assert LEGAL[cause]
    for before, after in product(RequestPhase, RequestPhase):
        if (before, after) in LEGAL[cause]:
            require_legal("a", before, after, cause)
        else:
            with pytest.raises(IllegalTransition, match=f"a: {before.name} → {after.name} by"):
                require_legal("a", before, after, cause)


def test_ledger_refuses_illegal_transition_and_keeps_phase() -> None:
    ledger = Ledger()
    ledger.begin_step(0.0)
    job = ledger.add(request("a"), "g#1")
    with pytest.raises(IllegalTransition, match="a: FORECASTING → QUEUED by paused"):
        ledger.enqueue(job, TransitionCause.PAUSED)
    assert ledger.phase(job) is RequestPhase.FORECASTING
    assert [t.cause for t in ledger.transitions] == [TransitionCause.ARRIVED]


@pytest.mark.parametrize("cause", TransitionCause)
def test_transition_resumes_or_interrupts_but_not_both(cause: TransitionCause) -> None:
    for before, after in LEGAL[cause]:
        change = Transition("a", before, after, cause, 0.0)
        assert not (change.resumes and change.interrupts)
        assert not change.resumes or after is RequestPhase.RUNNING
        assert not change.interrupts or after is not RequestPhase.RUNNING
