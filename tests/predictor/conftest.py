"""Fixtures of all predictor tests."""

import pytest

from services.predictor import service


@pytest.fixture(autouse=True)
def _long_observe_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observe waits longer for learning, so that tests pass on a slow machine."""
    monkeypatch.setattr(service, "OBSERVE_WAIT_S", 10.0)
