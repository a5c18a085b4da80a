"""Children are started again, given up when they keep ending, and ended together."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from foretoken.running.children.processes import Child
from foretoken.running.children.restart_policy import RestartCounter, RestartPolicy
from foretoken.running.children.supervisor import ProcessFailed, Supervisor, supervise
from services.runtime.backoff import Backoff
from services.runtime.errors import UnrecoverableError
from services.runtime.server import Lifecycle
from services.runtime.startup import UP
from services.runtime.tasks import root_cause
from tests.reach import until
from tests.system.children import children, is_alive

MODULE = "tests.foretoken.crashing_child"
SOON = RestartPolicy(Backoff(0.01, 0.02), max_exits=3)
NEVER_S = 60.0  # no test waits for so long where all is right


def test_restart_counter_backs_off_and_gives_up() -> None:
    lives = RestartCounter(RestartPolicy())
    assert [lives.record_exit(59.0) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert lives.record_exit(61.0) == 0.5  # what ran for long begins anew
    assert [lives.record_exit(1.0) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert lives.record_exit(60.0) is None


@dataclass
class Minded:
    supervisor: Supervisor
    lifecycle: Lifecycle
    stages: list[tuple[str, str]] = field(default_factory=list)

    async def up(self, name: str, times: int = 1) -> None:
        await until(lambda: self.stages.count((name, UP)) >= times, 30)


def child(name: str, does: str) -> Child:
    section = name.partition("-")[0]
    return Child(name, section, MODULE, {section: {"does": does}})


def mine() -> list[int]:
    return sorted(children(os.getpid(), MODULE))


@asynccontextmanager
async def supervised(*those: Child) -> AsyncIterator[Minded]:
    stages: list[tuple[str, str]] = []
    lifecycle = Lifecycle()

    def reported(name: str, stage: str) -> None:
        stages.append((name, stage))

    async with supervise(those, lifecycle, reported, SOON) as supervisor:
        yield Minded(supervisor, lifecycle, stages)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "foretoken.running.children.supervisor"
    ]


async def test_killed_child_keeps_its_identity(caplog: pytest.LogCaptureFixture) -> None:
    async with supervised(child("worker-0", "stays"), child("predictor", "stays")) as it:
        await it.up("worker-0")
        await it.up("predictor")
        it.supervisor.finish_start()
        [first] = [pid for pid in mine() if "worker.does" in arguments(pid)]
        os.kill(first, signal.SIGKILL)
        await it.up("worker-0", 2)
        assert it.stages.count(("predictor", UP)) == 1
        assert first not in mine() and len(mine()) == 2
        assert ("worker-0", "thinking") in it.stages
    assert mine() == []
    again, back = warnings(caplog)
    assert again == "worker-0 exited (status -9); restarting it"
    assert back.startswith("worker-0 is back after ")


async def test_rejected_settings_end_the_start_with_their_message() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(child("worker-0", "stays"), child("predictor", "refuses")):
            await asyncio.sleep(NEVER_S)
    assert isinstance(reason := root_cause(caught.value), ProcessFailed)
    assert str(reason) == "it will not"
    assert mine() == []


async def test_required_child_that_fails_at_start_ends_the_block() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(child("worker-0", "dies")):
            await asyncio.sleep(NEVER_S)
    assert isinstance(reason := root_cause(caught.value), ProcessFailed)
    assert str(reason) == "the worker-0 process ended with status 3"


async def test_crashing_predictor_is_given_up_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with supervised(child("predictor", "dies"), child("worker-0", "stays")) as it:
        await it.up("worker-0")
        await until(lambda: it.supervisor.count("predictor") == 0, 30)
        assert len(mine()) == 1
    assert warnings(caplog)[-1] == (
        "predictor exited 3 times, each within 60 s of its start, and is not restarted; the last "
        "exit was status 3; forecasts come from history"
    )


async def test_last_worker_given_up_ends_the_block(tmp_path: Path) -> None:
    """The first that is, does not: its requests go to the other."""
    once = [child(f"worker-{n}", f"stays-once {tmp_path}/{n}") for n in range(2)]
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(*once) as it:
            await it.up("worker-0")
            await it.up("worker-1")
            it.supervisor.finish_start()
            first, second = mine()
            os.kill(first, signal.SIGKILL)
            await until(lambda: it.supervisor.count("worker") == 1, 30)
            assert is_alive(second)
            os.kill(second, signal.SIGKILL)
            await asyncio.sleep(NEVER_S)
    assert isinstance(reason := root_cause(caught.value), UnrecoverableError)
    assert str(reason).endswith(
        " exited 3 times, each within 60 s of its start, and is not restarted; the last exit was"
        " it will not"
    )


async def test_stopped_child_is_not_restarted() -> None:
    async with supervised(child("worker-0", "stays"), child("predictor", "stays")) as it:
        await it.up("worker-0")
        await it.up("predictor")
        it.supervisor.finish_start()
        await it.supervisor.stop(("worker",))
        [left] = mine()
        assert "predictor.does" in arguments(left)


async def test_second_signal_kills_a_child_that_ignores_sigterm() -> None:
    async with supervised(child("worker-0", "deaf"), child("worker-1", "deaf")) as it:
        await it.up("worker-0")
        await it.up("worker-1")
        it.supervisor.finish_start()
        stopping = asyncio.ensure_future(it.supervisor.stop(("worker",)))
        await asyncio.sleep(0.1)
        assert len(mine()) == 2 and not stopping.done()
        it.lifecycle.signal()
        it.lifecycle.signal()
        async with asyncio.timeout(30):
            await stopping
        assert mine() == []


async def test_interrupted_start_leaves_no_process() -> None:
    """During the start, a child that ignores SIGTERM is killed after a short grace period."""
    with pytest.raises(TimeoutError):
        async with (
            asyncio.timeout(0.3),
            supervised(*(child(f"worker-{n}", "deaf") for n in range(3))),
        ):
            await asyncio.sleep(NEVER_S)
    assert mine() == []


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
