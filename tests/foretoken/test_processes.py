"""A service process that can be done without: started again, unless it refuses its settings."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from foretoken.options import Sections
from foretoken.processes import ProcessFailed, kept_running
from protos import predictor_pb2, predictor_pb2_grpc
from services.runtime.channel import connect
from services.runtime.server import Lifecycle
from services.runtime.tasks import cause
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
        async with kept_running("predictor", MODULE, own, Lifecycle(), channel):
            yield predictor_pb2_grpc.PredictorStub(channel)
    finally:
        await channel.close()


def mine() -> list[int]:
    return children(os.getpid(), MODULE)


def _has_followed(pid: int) -> bool:
    return mine() not in ([], [pid])


@pytest.mark.slow
async def test_it_is_started_again_and_ends_with_the_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with predictor(tmp_path) as stub:
        for _ in range(2):
            answer = await stub.Forecast(ASKED, wait_for_ready=True, timeout=60)
            assert len(answer.forecasts) == 1
            [pid] = mine()
            os.kill(pid, signal.SIGKILL)
            await until(partial(_has_followed, pid), 60)
        [last] = mine()
    assert not is_alive(last)
    said = [r.getMessage() for r in caplog.records if r.name == "foretoken.processes"]
    assert said == ["the predictor ended (status -9): it is started again"]


async def test_settings_it_refuses_end_the_block_with_its_sentence(tmp_path: Path) -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with predictor(tmp_path, model="blendd"), asyncio.timeout(60):
            await asyncio.Event().wait()
    reason = cause(caught.value)
    assert isinstance(reason, ProcessFailed)
    assert str(reason).startswith("no predictor is called 'blendd'; known: blend, ")
    assert mine() == []


async def test_one_that_dies_before_it_listens_is_started_again(tmp_path: Path) -> None:
    async with predictor(tmp_path):
        await until(lambda: len(mine()) == 1)
        [pid] = mine()
        os.kill(pid, signal.SIGKILL)
        await until(partial(_has_followed, pid), 30)


@pytest.mark.slow
async def test_it_ends_when_whoever_started_it_is_gone(tmp_path: Path) -> None:
    """As when `foretoken serve` was killed: here, its starter is no parent of it at all."""
    async with predictor(tmp_path, started_by="1") as stub:
        await stub.Forecast(ASKED, wait_for_ready=True, timeout=60)
        [pid] = mine()
        await until(lambda: not is_alive(pid), 30)
