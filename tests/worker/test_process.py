"""`python -m services.worker` as a process: wrong settings, SIGTERM, and the loss of a
scheduler."""

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from protos.generated import scheduler_pb2_grpc
from services.core import Grant, HeldRequest, Pause, Residency
from services.runtime.codecs.attach import decode_held
from services.runtime.errors import Code, ServiceError
from services.runtime.network.channel import connect
from services.runtime.server import Mount, listening
from tests.worker.worker_fixtures import generate, prompt_tokens, reference
from tests.worker.worker_serving import RecordingGateway, RecordingScheduler, until

pytestmark = pytest.mark.slow


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


def mounted(scheduler: RecordingScheduler) -> Mount:
    add = scheduler_pb2_grpc.add_SchedulerServicer_to_server
    return Mount("foretoken.v1.Scheduler", add, scheduler)


@asynccontextmanager
async def attached(
    folder: Path, **settings: object
) -> AsyncIterator[tuple[Process, RecordingScheduler, RecordingGateway]]:
    """A worker process, the scheduler that it attached to, and a gateway on its stream."""
    with TemporaryDirectory() as sockets:
        scheduler = RecordingScheduler()
        addresses = {"address": f"unix:{sockets}/w", "scheduler_address": f"unix:{sockets}/s"}
        async with listening([mounted(scheduler)], addresses["scheduler_address"]) as server:
            scheduler.address = addresses["scheduler_address"]
            scheduler.stop = lambda: server.stop(0)
            process = await start(model=folder, kv_tokens=512, profile_s=0, **addresses, **settings)
            channel = connect(addresses["address"])
            try:
                await until(lambda: scheduler.hellos, 60)  # time for two processes to start
                yield process, scheduler, RecordingGateway(channel, "g")
            finally:
                await channel.close()
                if process.returncode is None:
                    process.kill()
                await process.wait()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"model": "/nowhere/at/all"},
            "cannot load model '/nowhere/at/all': the folder does",
        ),
        ({"kv_tokenz": 5}, "unknown config key worker.kv_tokenz, did you mean kv_tokens?"),
        ({"max_running": 0}, "worker.max_running: Input should be greater than or equal to 1"),
        ({"device": "tpu"}, "Input should be 'auto', 'cpu', 'cuda', or 'cuda:' and a"),
    ],
    ids=("model", "key", "range", "device"),
)
async def test_wrong_setting_is_a_one_line_error_with_status_2(settings, sentence):
    process = await start(**settings)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert errors.decode().count("\n") == 1 and sentence in errors.decode()


async def test_first_sigterm_drains_requests(folder):
    async with attached(folder) as (process, scheduler, gateway):
        reading = asyncio.create_task(gateway.read())
        gateway.send("r", prompt_tokens(1, 5), 200, ignore_eos=True)
        scheduler.admit("r")
        await until(lambda: gateway.tokens["r"])
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await asyncio.gather(reading, return_exceptions=True)
    assert len(gateway.tokens["r"]) == 200
    assert scheduler.drains_s == [30.0]
    finished = [each for report in scheduler.reports for each in report.finished]
    assert [each.request_id for each in finished] == ["r"]  # reported before it left


@pytest.mark.slow
async def test_sigterm_returns_requests_that_the_scheduler_moves(folder):
    async with attached(folder) as (process, scheduler, gateway):
        reading = asyncio.create_task(gateway.read())
        gateway.send("r", prompt_tokens(1, 5), 200, ignore_eos=True)
        scheduler.admit("r", limit=3)  # an endless request
        await until(lambda: len(gateway.tokens["r"]) == 3)
        process.send_signal(signal.SIGTERM)
        await until(lambda: scheduler.drains_s)
        assert process.returncode is None
        scheduler.plan(pause=(Pause("r", Residency.DROP),))
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await asyncio.gather(reading, return_exceptions=True)


@pytest.mark.slow
async def test_second_sigterm_stops_at_once(folder):
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


async def test_restarted_scheduler_adopts_requests_with_their_kv(folder):
    async with attached(folder) as (process, first, gateway):
        reading = asyncio.create_task(gateway.read())
        gateway.send("r", prompt_tokens(1, 5), 60, ignore_eos=True)
        first.admit("r", limit=20)
        await until(lambda: len(gateway.tokens["r"]) == 20)
        await first.stop()
        second = RecordingScheduler()
        async with listening([mounted(second)], first.address):
            await until(lambda: second.reports)
            held = decode_held(second.hellos[0])
            second.plan(extend=(Grant("r", 60),))
            await until(lambda: "r" in second.finished)
            await until(lambda: "r" in gateway.ended)
        process.kill()
        await asyncio.gather(reading, return_exceptions=True)
    assert held == (HeldRequest("r", 5, 60, 20, 24, limit_tokens=20, running=True, blocks=2),)
    assert (second.reports[0].seq, second.reports[0].applied_plan_seq) == (1, 0)
    assert (second.reports[-1].applied_plan_seq, second.reports[-1].free_blocks) == (1, 32)
    steps = [timing for report in second.reports for timing in report.timings]
    new = [step for step in steps if step.context_tokens >= 24]
    assert len(new) == 40 and not any(step.prefill_tokens for step in new)
    assert gateway.tokens["r"] == generate("llama", prompt_tokens(1, 5), 60)[0]


@pytest.mark.slow
async def test_requests_continue_without_a_scheduler_and_ends_are_reported_later(folder):
    async with attached(folder) as (process, first, gateway):
        reading = asyncio.create_task(gateway.read())
        gateway.send("r", prompt_tokens(1, 5), 200, ignore_eos=True)
        first.admit("r")
        await until(lambda: gateway.tokens["r"])
        await first.stop()
        before = len(gateway.tokens["r"])
        await until(lambda: "r" in gateway.ended)
        second = RecordingScheduler()
        async with listening([mounted(second)], first.address):
            await until(lambda: second.reports)
        process.kill()
        await asyncio.gather(reading, return_exceptions=True)
    assert before < 200 and "r" not in first.finished
    assert not second.hellos[0].held
    assert [f.request_id for f in second.reports[0].finished] == ["r"]


@pytest.mark.slow
async def test_unadopted_requests_are_dropped(folder):
    async with attached(folder, orphan_hold_s=0.2) as (process, first, gateway):
        reading = asyncio.create_task(gateway.read())
        gateway.send("r", prompt_tokens(1, 5), 60, ignore_eos=True)
        first.admit("r", limit=20)
        await until(lambda: len(gateway.tokens["r"]) == 20)
        await first.stop()
        await asyncio.sleep(1)
        second = RecordingScheduler()
        async with listening([mounted(second)], first.address):
            await until(lambda: second.reports)
        process.kill()
        await asyncio.gather(reading, return_exceptions=True)
    assert not second.hellos[0].held
    assert second.reports[0].free_blocks == 32


async def refuse_each(scheduler: RecordingScheduler, code: Code, asked: bool) -> None:
    """Refuses every stream, because a refusal during a write may be lost; if `asked`, after the
    worker is asked for an adapter."""
    refused: list[object] = []
    while True:
        await until(lambda: len(scheduler.hellos) > len(refused))
        refused[:] = scheduler.hellos
        if asked:
            scheduler.ask_adapters(1, one="/none")
        scheduler.hang_up(ServiceError(code, "another worker is called that"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "planned", "asked"),
    [
        (Code.ALREADY_EXISTS, True, False),
        (Code.INVALID_ARGUMENT, False, False),
        (Code.FAILED_PRECONDITION, False, True),
    ],
)
async def test_displaced_or_refused_worker_exits_with_the_reason(folder, code, planned, asked):
    async with attached(folder) as (process, scheduler, _):
        if planned:
            scheduler.plan()
            await until(lambda: scheduler.reports and scheduler.reports[-1].applied_plan_seq)
        refusing = asyncio.create_task(refuse_each(scheduler, code, asked))
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        refusing.cancel()
    assert process.returncode == 2
    assert errors.decode().strip().endswith("refuses this worker: another worker is called that")


@pytest.mark.slow
async def test_broken_stream_is_reconnected(folder):
    async with attached(folder) as (_, scheduler, _):
        scheduler.plan()
        await until(lambda: scheduler.reports and scheduler.reports[-1].applied_plan_seq)
        scheduler.hang_up(ServiceError(Code.INVALID_ARGUMENT, "an unreadable report"))
        await until(lambda: len(scheduler.hellos) == 2)
        first, again = scheduler.hellos
        assert 0 < first.epoch == again.epoch


@pytest.mark.slow
async def test_orphaned_worker_exits_if_configured(folder):
    orphan = {"exit_when_orphaned": True, "orphaned_s": 0.2}
    async with attached(folder, **orphan) as (process, scheduler, _):
        await scheduler.stop()
        _, errors = await asyncio.wait_for(process.communicate(), 20)
        assert process.returncode == 2
        assert "has been gone for" in errors.decode()
