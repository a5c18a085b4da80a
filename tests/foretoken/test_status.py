"""The wait for the predictor before the ready line: its limit, and its end at a signal."""

import asyncio
from pathlib import Path

import pytest

from foretoken.running.children.processes import Child
from foretoken.running.children.supervisor import supervise
from foretoken.running.console import status
from foretoken.running.options import Sections
from protos.generated import predictor_pb2, predictor_pb2_grpc
from services.runtime.network.channel import connect
from services.runtime.server import Lifecycle

FORECAST_REQUEST = predictor_pb2.ForecastRequest(
    inputs=[predictor_pb2.ForecastInput(request_id="r", model="demo", max_tokens=9)]
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "foretoken.running.console.status"]


async def test_start_waits_for_a_late_predictor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address, lifecycle = f"unix:{tmp_path}/p.sock", Lifecycle()
    settings: Sections = {"predictor": {"address": address, "log_level": "WARNING"}}
    channel = connect(address)
    waiting = asyncio.ensure_future(status.wait_for_predictor(channel, lifecycle, 120.0))
    try:
        await asyncio.wait({waiting}, timeout=0.5)  # the first attempts fail
        assert not waiting.done()
        child = Child("predictor", "predictor", "services.predictor", settings)
        async with supervise([child], lifecycle):
            await waiting
            stub = predictor_pb2_grpc.PredictorStub(channel)
            answer = await stub.Forecast(FORECAST_REQUEST, wait_for_ready=False, timeout=60)
            assert len(answer.forecasts) == 1
    finally:
        waiting.cancel()
        await channel.close()
    assert warnings(caplog) == []


async def test_missing_predictor_is_reported_after_the_limit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel = connect(f"unix:{tmp_path}/missing.sock")
    try:
        await status.wait_for_predictor(channel, Lifecycle(), 0.2)
    finally:
        await channel.close()
    assert warnings(caplog) == [
        "the predictor is not reachable after 0.2 s; until it is, forecasts use history"
    ]


async def test_signal_ends_the_wait_for_the_predictor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    channel, lifecycle = connect(f"unix:{tmp_path}/missing.sock"), Lifecycle()
    asyncio.get_running_loop().call_later(0.1, lifecycle.signal)
    try:
        async with asyncio.timeout(60):
            await status.wait_for_predictor(channel, lifecycle, 600.0)
    finally:
        await channel.close()
    assert warnings(caplog) == []
