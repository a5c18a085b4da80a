"""The ready line waits for the predictor, however late it starts."""

import os
import threading
import time
import urllib.request
from pathlib import Path

import grpc
import pytest

from foretoken.running.ports import free_port
from protos.generated import predictor_pb2, predictor_pb2_grpc
from tests.live import MODES, serving, wait_for

FORECAST_REQUEST = predictor_pb2.ForecastRequest(
    inputs=[predictor_pb2.ForecastInput(request_id="r", model="demo", max_tokens=9)]
)
# sitecustomize of every interpreter; the predictor waits until the gate file exists.
WAIT_FOR_GATE = """
import sys, time
from pathlib import Path

while "services.predictor" in sys.orig_argv and not Path({gate!r}).exists():
    time.sleep(0.02)
"""
TOO_EARLY_S = 1.0  # time in which a ready line without the predictor would appear


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_ready_line_follows_the_predictor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    gate = tmp_path / "gate"
    (tmp_path / "sitecustomize.py").write_text(WAIT_FOR_GATE.format(gate=str(gate)))
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), path))))
    http, predictor = free_port(), f"127.0.0.1:{free_port()}"

    def healthy() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{http}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def open_gate_once_healthy() -> None:
        try:
            wait_for(healthy, 120.0)
            time.sleep(TOO_EARLY_S)
        finally:
            gate.touch()

    opener = threading.Thread(target=open_gate_once_healthy)
    opener.start()
    try:
        arguments = ("--http-port", str(http), "--set", f"predictor.address={predictor}")
        with serving(*arguments, *MODES[mode]), grpc.insecure_channel(predictor) as channel:
            assert gate.exists()
            stub = predictor_pb2_grpc.PredictorStub(channel)
            assert len(stub.Forecast(FORECAST_REQUEST, timeout=30).forecasts) == 1
    finally:
        opener.join()
