"""A worker of two processes: it serves, and the end of one process ends the other."""

import asyncio
import signal
from os import kill
from pathlib import Path

import pytest

from services.worker.parallel.leader import MODULE
from tests.system.children import children, is_alive
from tests.worker.test_process import attached, start
from tests.worker.worker_fixtures import clear_cases, reference
from tests.worker.worker_serving import until


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(path)
    return path


def follower_of(pid: int) -> int:
    (follower,) = children(pid, MODULE)
    return follower


@pytest.mark.slow
async def test_tensor_parallel_worker_serves_and_sigterm_ends_all_ranks(folder):
    ((tokens, answer),) = clear_cases("llama", lengths=[20], new_tokens=12).values()
    async with attached(folder, tensor_parallel=2) as (process, scheduler, gateway):
        reading = asyncio.create_task(gateway.read())
        follower = follower_of(process.pid)
        gateway.send("r", tokens, len(answer), ignore_eos=True)
        scheduler.admit("r")
        await until(lambda: "r" in gateway.ended)
        process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        await asyncio.gather(reading, return_exceptions=True)
    assert process.returncode == 0 and gateway.tokens["r"] == answer
    assert not is_alive(follower)
    assert "Traceback" not in errors.decode() and "Warning" not in errors.decode()


@pytest.mark.slow
async def test_killed_rank_0_ends_the_follower(folder):
    """A killed rank 0 cannot report its end."""
    async with attached(folder, tensor_parallel=2) as (process, _, _):
        follower = follower_of(process.pid)
        process.kill()
        await until(lambda: not is_alive(follower))


@pytest.mark.slow
@pytest.mark.parametrize("busy", [True, False])
async def test_killed_follower_ends_the_worker_with_a_sentence(folder, busy):
    async with attached(folder, tensor_parallel=2) as (process, scheduler, gateway):
        reading = asyncio.create_task(gateway.read())
        if busy:
            gateway.send("r", (5, 6, 7), 240, ignore_eos=True)
            scheduler.admit("r")
            await until(lambda: gateway.tokens["r"])
        kill(follower_of(process.pid), signal.SIGKILL)
        _, errors = await asyncio.wait_for(process.communicate(), 30)
        await asyncio.gather(reading, return_exceptions=True)
    assert process.returncode == 2
    message = errors.decode().strip().splitlines()[-1]
    assert message == "foretoken worker: rank 1 of this worker's 2 ended with signal 9"


@pytest.mark.slow
async def test_unsplittable_model_is_a_one_line_error(folder):
    process = await start(model=folder, device="cpu", tensor_parallel=4)
    _, errors = await process.communicate()
    assert process.returncode == 2 and errors.decode().count("\n") == 1
    assert "2 key-value heads cannot be split evenly over 4 ranks" in errors.decode()
