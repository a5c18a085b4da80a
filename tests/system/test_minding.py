"""kill -9 of children under load: every answer is right, and they come back."""

import asyncio
import signal
import urllib.request
from pathlib import Path

import pytest

from foretoken import AsyncClient
from foretoken.client.errors import ForetokenError
from tests.system.minded import answers, killed, minded, right_while, said


@pytest.mark.slow
async def test_answers_survive_the_loss_of_a_worker_and_the_predictor(tmp_path: Path) -> None:
    with minded(tmp_path) as (live, says):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def both() -> None:
            await killed(live, "worker")
            await killed(live, "predictor")

        assert await right_while(live, expected, both) > 0
        assert live.stop() == 0
    assert "Traceback" not in says.read_text()


@pytest.mark.slow
async def test_embedded_server_restarts_all_children(tmp_path: Path) -> None:
    with minded(tmp_path) as (live, says):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def all_of_them() -> None:
            await killed(live, "worker")
            await said(says, "is back after")
            await killed(live, "worker")  # the other, or the same again
            await said(says, "is back after", 2)
            await killed(live, "predictor")
            await said(says, "predictor is back after")

        assert await right_while(live, expected, all_of_them) > 0
        assert live.stop() == 0
    assert "Traceback" not in says.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("section", ["worker", "predictor", "scheduler", "batcher", "estimator"])
async def test_separate_server_restarts_every_child(tmp_path: Path, section: str) -> None:
    with minded(tmp_path, "--separate") as (live, says):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def one() -> None:
            await killed(live, section)
            await said(says, "is back after")

        assert await right_while(live, expected, one) > 0
        assert live.stop() == 0
    assert "Traceback" not in says.read_text()


@pytest.mark.slow
async def test_connections_recover_from_a_gateway_restart(tmp_path: Path) -> None:
    with minded(tmp_path, "--separate") as (live, says):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)
            cut = asyncio.ensure_future(answers(client, 1_500))  # seconds
            await asyncio.sleep(0.2)
            await killed(live, "gateway")
            with pytest.raises(ForetokenError):
                await cut
        await said(says, "gateway is back after")
        async with AsyncClient(live.grpc) as client:
            assert await answers(client) == expected
        health = await asyncio.to_thread(urllib.request.urlopen, f"{live.http}/health", timeout=10)
        assert health.status == 200
        assert live.stop() == 0


@pytest.mark.slow
async def test_sigterm_of_a_worker_loses_no_request(tmp_path: Path) -> None:
    with minded(tmp_path) as (live, says):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def one() -> None:
            await killed(live, "worker", signal.SIGTERM)
            await said(says, "is back after")

        assert await right_while(live, expected, one) > 0
        assert live.stop() == 0
    assert "stopping with requests unfinished" not in says.read_text()


@pytest.mark.slow
async def test_sigterm_of_the_scheduler_rejects_no_request(tmp_path: Path) -> None:
    with minded(tmp_path, "--separate") as (live, says):
        async with AsyncClient(live.grpc) as client:
            expected = await answers(client)

        async def one() -> None:
            await killed(live, "scheduler", signal.SIGTERM)
            await said(says, "scheduler is back after")

        assert await right_while(live, expected, one) > 0
        assert live.stop() == 0
    assert "stopping with requests unfinished" not in says.read_text()
