"""The supervisor restarts children, goes on without one that keeps exiting, and stops them all."""

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
from services.runtime.errors import UnrecoverableError
from services.runtime.network.backoff import Backoff
from services.runtime.server import Lifecycle
from services.runtime.startup import UP
from services.runtime.tasks import root_cause
from tests.reach import until
from tests.system.children import children, is_alive

MODULE = "tests.foretoken.crashing_child"
SOON = RestartPolicy(Backoff(0.01, 0.02), max_exits=3)
NEVER_S = 60.0  # the block ends before, unless the test fails


def test_restart_counter_backs_off_and_gives_up() -> None:
    counter = RestartCounter(RestartPolicy())
    assert [counter.record_exit(59.0) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert counter.record_exit(61.0) == 0.5  # a steady run resets the count
    assert [counter.record_exit(1.0) for _ in range(4)] == [0.5, 1.0, 2.0, 4.0]
    assert counter.record_exit(60.0) is None


@dataclass
class Supervised:
    supervisor: Supervisor
    lifecycle: Lifecycle
    stages: list[tuple[str, str]] = field(default_factory=list)

    async def wait_until_up(self, name: str, times: int = 1) -> None:
        await until(lambda: self.stages.count((name, UP)) >= times, 30)


def child(name: str, behaviour: str) -> Child:
    section = name.partition("-")[0]
    return Child(name, section, MODULE, {section: {"does": behaviour}})


def child_pids() -> list[int]:
    return sorted(children(os.getpid(), MODULE))


@asynccontextmanager
async def supervised(*kept: Child, policy: RestartPolicy = SOON) -> AsyncIterator[Supervised]:
    stages: list[tuple[str, str]] = []
    lifecycle = Lifecycle()

    def on_stage(name: str, stage: str) -> None:
        stages.append((name, stage))

    async with supervise(kept, lifecycle, on_stage, policy) as supervisor:
        yield Supervised(supervisor, lifecycle, stages)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [
        r.getMessage() for r in caplog.records if r.name == "foretoken.running.children.supervisor"
    ]


async def test_killed_child_keeps_its_identity(caplog: pytest.LogCaptureFixture) -> None:
    async with supervised(child("worker-0", "stays"), child("predictor", "stays")) as system:
        await system.wait_until_up("worker-0")
        await system.wait_until_up("predictor")
        system.supervisor.finish_start()
        [first] = [pid for pid in child_pids() if "worker.does" in arguments(pid)]
        os.kill(first, signal.SIGKILL)
        await system.wait_until_up("worker-0", 2)
        assert system.stages.count(("predictor", UP)) == 1
        assert first not in child_pids() and len(child_pids()) == 2
        assert ("worker-0", "loading") in system.stages
    assert child_pids() == []
    exited, restarted = warnings(caplog)
    assert exited == "worker-0 exited (status -9); restarting it"
    assert restarted.startswith("worker-0 is back after ")


async def test_rejected_settings_end_the_start_with_their_message() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(child("worker-0", "stays"), child("predictor", "rejects-settings")):
            await asyncio.sleep(NEVER_S)
    assert isinstance(reason := root_cause(caught.value), ProcessFailed)
    assert str(reason) == "the settings are invalid"
    assert child_pids() == []


async def test_required_child_that_fails_at_start_ends_the_block() -> None:
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(child("worker-0", "exits")):
            await asyncio.sleep(NEVER_S)
    assert isinstance(reason := root_cause(caught.value), ProcessFailed)
    assert str(reason) == "the worker-0 process ended with status 3"


async def test_crashing_predictor_is_given_up_with_a_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with supervised(child("predictor", "exits"), child("worker-0", "stays")) as system:
        await system.wait_until_up("worker-0")
        await until(lambda: system.supervisor.count("predictor") == 0, 30)
        assert len(child_pids()) == 1
    assert warnings(caplog)[-1] == (
        "predictor exited 3 times, each within 60 s of its start; the last exit was status 3; it "
        "is tried again in 600 s; forecasts come from history"
    )


async def test_given_up_predictor_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fails = child("predictor", f"exits-thrice {tmp_path}/starts")
    policy = RestartPolicy(Backoff(0.01, 0.02), max_exits=3, retry_s=0.01)
    async with supervised(fails, child("worker-0", "stays"), policy=policy) as system:
        system.supervisor.finish_start()
        await system.wait_until_up("predictor")
        assert system.supervisor.count("predictor") == 1
    *exits, back = warnings(caplog)
    assert [each.partition(";")[2] for each in exits] == [
        " restarting it",
        " restarting it",
        " the last exit was status 3; it is tried again in 0.01 s; forecasts come from history",
    ]
    assert back.startswith("predictor is back after ")


async def test_last_worker_given_up_ends_the_block(tmp_path: Path) -> None:
    """The block goes on while another worker remains."""
    once = [child(f"worker-{n}", f"stays-once {tmp_path}/{n}") for n in range(2)]
    with pytest.raises(BaseExceptionGroup) as caught:
        async with supervised(*once) as system:
            await system.wait_until_up("worker-0")
            await system.wait_until_up("worker-1")
            system.supervisor.finish_start()
            first, second = child_pids()
            os.kill(first, signal.SIGKILL)
            await until(lambda: system.supervisor.count("worker") == 1, 30)
            assert is_alive(second)
            os.kill(second, signal.SIGKILL)
            await asyncio.sleep(NEVER_S)
    assert isinstance(reason := root_cause(caught.value), UnrecoverableError)
    assert str(reason).endswith(
        " exited 3 times, each within 60 s of its start; the last exit was the settings are invalid"
    )


async def test_stopped_child_is_not_restarted() -> None:
    async with supervised(child("worker-0", "stays"), child("predictor", "stays")) as system:
        await system.wait_until_up("worker-0")
        await system.wait_until_up("predictor")
        system.supervisor.finish_start()
        await system.supervisor.stop(("worker",))
        [left] = child_pids()
        assert "predictor.does" in arguments(left)


async def test_second_signal_kills_a_child_that_ignores_sigterm() -> None:
    async with supervised(
        child("worker-0", "ignores-sigterm"), child("worker-1", "ignores-sigterm")
    ) as system:
        await system.wait_until_up("worker-0")
        await system.wait_until_up("worker-1")
        system.supervisor.finish_start()
        stopping = asyncio.ensure_future(system.supervisor.stop(("worker",)))
        await asyncio.sleep(0.1)
        assert len(child_pids()) == 2 and not stopping.done()
        system.lifecycle.signal()
        system.lifecycle.signal()
        async with asyncio.timeout(30):
            await stopping
        assert child_pids() == []


async def test_interrupted_start_leaves_no_process() -> None:
    """During the start, a child that ignores SIGTERM is killed after a short grace period."""
    with pytest.raises(TimeoutError):
        async with (
            asyncio.timeout(0.3),
            supervised(*(child(f"worker-{n}", "ignores-sigterm") for n in range(3))),
        ):
            await asyncio.sleep(NEVER_S)
    assert child_pids() == []


def arguments(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()
