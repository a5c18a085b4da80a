"""`foretoken serve` keeps serving when its predictor process dies, and replaces it."""

import os
import signal

import pytest

from foretoken import Client
from tests.live import serving, wait_for
from tests.system.children import children, is_alive

MODULE = "services.predictor"


@pytest.mark.slow
def test_killed_predictor_is_replaced_without_failures():
    with serving() as live, Client(live.grpc) as client:

        def answer() -> str:
            stream = client.generate("Reverse: red blue green\n", max_tokens=16, temperature=0.0)
            return stream.complete().text.strip()

        [first] = children(live.process.pid, MODULE)
        assert answer() == "green blue red"
        os.kill(first, signal.SIGKILL)
        assert [answer() for _ in range(3)] == ["green blue red"] * 3
        wait_for(lambda: children(live.process.pid, MODULE) not in ([], [first]), 60)
        assert answer() == "green blue red"
        [second] = children(live.process.pid, MODULE)
        assert live.stop() == 0
        assert not is_alive(second)


@pytest.mark.slow
def test_killed_serve_leaves_no_predictor_behind():
    with serving() as live:
        [predictor] = children(live.process.pid, MODULE)
        live.process.kill()
        wait_for(lambda: not is_alive(predictor), 60)
