"""A real predictor process is restarted by its supervisor and ends with its parent."""

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from foretoken.running.children.processes import Child
from foretoken.running.children.supervisor import supervise
from foretoken.running.options import Sections
from protos.generated import predictor_pb2, predictor_pb2_grpc
from services.runtime.network.channel import connect
from services.runtime.server import Lifecycle
from tests.reach import until
from tests.system.children import children, is_alive

MODULE = "services.predictor"
FORECAST_REQUEST = predictor_pb2.ForecastRequest(
    inputs=[predictor_pb2.ForecastInput(request_id="r", model="demo", max_tokens=9)]
)


@asynccontextmanager
async def predictor(
    folder: Path, **settings: str
) -> AsyncIterator["predictor_pb2_grpc.PredictorAsyncStub"]:
    address = f"unix:{folder}/p.sock"
    channel = connect(address)
    own: Sections = {"predictor": {"address": address, "log_level": "WARNING"} | settings}
    try:
        async with supervise(
            [Child("predictor", "predictor", MODULE, own)], Lifecycle()
        ) as supervisor:
            supervisor.finish_start()
            yield predictor_pb2_grpc.PredictorStub(channel)
    finally:
        await channel.close()


def predictor_pids() -> list[int]:
    return children(os.getpid(), MODULE)


def _is_replaced(pid: int) -> bool:
    return predictor_pids() not in ([], [pid])


@pytest.mark.slow
async def test_child_is_restarted_and_stopped_with_the_block(tmp_path: Path) -> None:
    async with predictor(tmp_path) as stub:
        for _ in range(2):
            answer = await stub.Forecast(FORECAST_REQUEST, wait_for_ready=True, timeout=60)
            assert len(answer.forecasts) == 1
            [pid] = predictor_pids()
            os.kill(pid, signal.SIGKILL)
            await until(partial(_is_replaced, pid), 60)
        [last] = predictor_pids()
    assert not is_alive(last)


@pytest.mark.slow
async def test_child_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """Its `started_by` is not its parent, as after `foretoken serve` was killed."""
    async with predictor(tmp_path, started_by="1") as stub:
        await stub.Forecast(FORECAST_REQUEST, wait_for_ready=True, timeout=60)
        [pid] = predictor_pids()
        await until(lambda: not is_alive(pid), 30)
