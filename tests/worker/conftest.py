"""Checks the integrity of each worker state that a slow test creates."""

from collections.abc import Iterator
from weakref import WeakSet

import pytest

from services.worker.requests.state import WorkerState
from services.worker.requests.types.limits import Limits


@pytest.fixture(autouse=True)
def integrity(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Runs `check_integrity` on each live WorkerState that a slow test created in this process."""
    if request.node.get_closest_marker("slow") is None:
        yield
        return
    states: WeakSet[WorkerState] = WeakSet()
    create = WorkerState.__init__

    def create_and_record(state: WorkerState, limits: Limits) -> None:
        create(state, limits)
        states.add(state)

    monkeypatch.setattr(WorkerState, "__init__", create_and_record)
    yield
    for state in states:
        state.check_integrity()
