"""The predictor as a supervised process: a real one comes back, and ends with its parent."""

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
from services.runtime.channel import connect
from services.runtime.server import Lifecycle
from tests.reach import until
from tests.system.children import children, is_alive

MODULE = "services.predictor"
ASKED = predictor_pb2.ForecastRequest(
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


def mine() -> list[int]:
    return children(os.getpid(), MODULE)


def _has_followed(pid: int) -> bool:
    return mine() not in ([], [pid])


@pytest.mark.slow
async def test_child_is_restarted_and_stopped_with_the_block(tmp_path: Path) -> None:
    async with predictor(tmp_path) as stub:
        for _ in range(2):
            answer = await stub.Forecast(ASKED, wait_for_ready=True, timeout=60)
            assert len(answer.forecasts) == 1
            [pid] = mine()
            os.kill(pid, signal.SIGKILL)
            await until(partial(_has_followed, pid), 60)
        [last] = mine()
    assert not is_alive(last)


@pytest.mark.slow
async def test_child_ends_when_its_parent_is_gone(tmp_path: Path) -> None:
    """As when `foretoken serve` was killed: here, its starter is no parent of it at all."""
    async with predictor(tmp_path, started_by="1") as stub:
        await stub.Forecast(ASKED, wait_for_ready=True, timeout=60)
        [pid] = mine()
        await until(lambda: not is_alive(pid), 30)
