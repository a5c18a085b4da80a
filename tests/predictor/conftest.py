"""What holds for every test of the predictor."""

import pytest

from services.predictor import service


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Observe waits for its outcomes to be learnt; here also on a machine that stood still."""
    monkeypatch.setattr(service, "LEARN_S", 10.0)
