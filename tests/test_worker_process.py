"""`python -m services.worker` as a process: bad settings, SIGTERM, a scheduler that goes away."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from protos import scheduler_pb2_grpc
from services.runtime.channel import connect
from services.runtime.server import Mount, listening
from tests.test_worker_service import RecordingGateway, RecordingScheduler, until
from tests.worker_fixtures import prompt_tokens, reference


async def start(**settings: object) -> Process:
    sets = [part for key, value in settings.items() for part in ("--set", f"worker.{key}={value}")]
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.worker", *sets, stderr=PIPE
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    reference("llama").save_pretrained(path)
    return path


@asynccontextmanager
async def attached(
    folder: Path, **settings: object
) -> AsyncIterator[tuple[Process, RecordingScheduler, RecordingGateway]]:
    """A worker process, the scheduler it attached to, and a gateway on its stream."""
    with TemporaryDirectory() as sockets:
        scheduler = RecordingScheduler()
        add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
        mount = Mount("foretoken.v1.Scheduler", add, scheduler)
        addresses = {"address": f"unix:{sockets}/w", "scheduler_address": f"unix:{sockets}/s"}
        async with listening([mount], addresses["scheduler_address"]) as server:
            scheduler.stop = lambda: server.stop(0)
            process = await start(model=folder, kv_tokens=512, profile_s=0, **addresses, **settings)
            channel = connect(addresses["address"])
            try:
                await until(lambda: scheduler.hellos)
                yield process, scheduler, RecordingGateway(channel, "g")
            finally:
                await channel.close()
                if process.returncode is None:
                    process.kill()
                await process.wait()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"model": "/nowhere/at/all"}, "cannot load model '/nowhere/at/all': there is no such"),
        ({"kv_tokenz": 5}, "unknown config key worker.kv_tokenz, did you mean kv_tokens?"),
        ({"max_running": 0}, "worker.max_running: Input should be greater than or equal to 1"),
        ({"device": "tpu"}, "worker.device: Input should be 'auto', 'cpu' or 'cuda'"),
    ],
    ids=("model", "key", "range", "device"),
)
async def test_a_wrong_setting_is_one_line_and_status_2(settings, sentence):
    process = await start(**settings)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().count("\n") == 1 and sentence in errors.decode()


async def test_the_first_sigterm_lets_requests_finish(folder):
    async with attached(folder) as (process, scheduler, gateway):
        reading = asyncio.create_task(gateway.read())
        gateway.send("r", prompt_tokens(1, 5), 200, ignore_eos=True)
        scheduler.admit("r")
        await until(lambda: gateway.tokens["r"])
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await asyncio.gather(reading, return_exceptions=True)
    assert len(gateway.tokens["r"]) == 200


async def test_the_second_sigterm_stops_at_once(folder):
    async with attached(folder) as (process, scheduler, gateway):
        reading = asyncio.create_task(gateway.read())
        gateway.send("r", prompt_tokens(1, 5), 200, ignore_eos=True)
        scheduler.admit("r", limit=3)  # waits for an extension that never comes
        await until(lambda: len(gateway.tokens["r"]) == 3)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(process.wait(), 0.3)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await asyncio.gather(reading, return_exceptions=True)


async def test_an_orphan_that_was_told_to_ends(folder):
    orphan = {"exit_when_orphaned": True, "orphaned_s": 0.2}
    async with attached(folder, **orphan) as (process, scheduler, _):
        await scheduler.stop()
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 2
        assert "has been gone for" in errors.decode()
