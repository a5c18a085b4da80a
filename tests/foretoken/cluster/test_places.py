"""Processes in bundles of a Ray cluster: addresses, messages, exits, stops, and what is missing."""

import asyncio
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from foretoken.running.children.processes import Child, Exit, Process
from foretoken.running.cluster import ray_places
from foretoken.running.cluster.places import CLUSTERS, Places
from foretoken.vllm.worker.config import VllmWorkerConfig
from services.runtime.config import ConfigError, load
from services.runtime.server import Lifecycle
from services.runtime.startup import UP
from services.worker.config import WorkerConfig
from tests.reach import until
from tests.system.children import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("shared_cluster")]
reserve = CLUSTERS["ray"]


class Stages:
    """The reported stages of one child."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, name: str, stage: str) -> None:
        assert name == "worker-0"
        self.seen.append(stage)

    async def wait_up(self) -> None:
        await until(lambda: UP in self.seen, 60)


async def launched(places: Places, does: str, stages: Stages) -> Process:
    own = {"does": does, **places.workers[0]}
    child = Child("worker-0", "worker", "tests.foretoken.crashing_child", {"worker": own})
    return await places.launch(child, stages)


def pids(does: str) -> list[int]:
    """Processes of `crashing_child` that do this, whichever node started them."""
    found = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if f"worker.does={does}".encode() in arguments:
                found.append(int(folder.name))
    return found


async def test_places_are_spread_and_have_addresses_of_their_own():
    async with reserve(WorkerConfig(), 4) as places:
        addresses = [each["address"] for each in places.workers]
        assert len({*addresses, places.scheduler["address"]}) == 5
        assert {each["local_rank"] for each in places.workers} == {"0"}


async def test_exit_and_error_message_arrive():
    async with reserve(WorkerConfig(), 1) as places:
        process = await launched(places, "rejects-settings", stages := Stages())
        assert await process.wait() == Exit(2, "the settings are invalid")
        await process.stop(Lifecycle(), 1.0)
        assert stages.seen == ["loading"]


async def test_stop_terminates_the_process():
    async with reserve(WorkerConfig(), 1) as places:
        process = await launched(places, "stays", stages := Stages())
        await stages.wait_up()
        [pid] = pids("stays")
        await process.stop(Lifecycle(), 30.0)
        await until(lambda: not is_alive(pid), 10)


async def test_stop_kills_a_process_that_ignores_sigterm_after_the_grace_period():
    async with reserve(WorkerConfig(), 1) as places:
        process = await launched(places, "ignores-sigterm", stages := Stages())
        await stages.wait_up()
        [pid] = pids("ignores-sigterm")
        await process.stop(Lifecycle(), 0.2)
        await until(lambda: not is_alive(pid), 10)


async def test_killed_process_reports_its_signal_and_its_bundle_is_free_again():
    async with reserve(WorkerConfig(), 1) as places:
        for _ in range(2):
            process = await launched(places, "stays", stages := Stages())
            await stages.wait_up()
            [pid] = pids("stays")
            os.kill(pid, signal.SIGKILL)
            assert await process.wait() == Exit(-signal.SIGKILL)
            await process.stop(Lifecycle(), 1.0)


async def test_launch_that_is_cancelled_leaves_no_process():
    async with reserve(WorkerConfig(), 1) as places:
        launching = asyncio.create_task(launched(places, "stays", Stages()))
        await asyncio.sleep(0)
        launching.cancel()
        await asyncio.wait({launching})
        assert launching.cancelled()
        process = await launched(places, "stays", stages := Stages())  # in the same bundle
        await stages.wait_up()
        assert len(pids("stays")) == 1
        await process.stop(Lifecycle(), 30.0)


async def test_start_that_fails_on_its_node_is_an_exit():
    async with reserve(WorkerConfig(), 1) as places:
        child = Child("worker-0", "worker", "tests.foretoken.crashing_child", {"worker": {}})
        process = await places.launch(child, Stages())
        assert await process.wait() == Exit(-signal.SIGKILL, "Ray: KeyError: 'address'")
        await process.stop(Lifecycle(), 1.0)
        process = await launched(places, "stays", stages := Stages())  # in the same bundle
        await stages.wait_up()
        await process.stop(Lifecycle(), 30.0)


@pytest.mark.parametrize(
    ("kind", "worker", "workers", "wanted"),
    [
        (WorkerConfig, {}, 5, "1 CPU"),
        (WorkerConfig, {"torch_threads": "3"}, 1, "3 CPU"),
        (WorkerConfig, {"tensor_parallel": "3"}, 1, "3 CPU"),
        (VllmWorkerConfig, {"tensor_parallel": "3", "vllm_args": "{}"}, 1, "3 CPU"),
    ],
)
async def test_missing_resources_are_one_sentence(
    kind: type[WorkerConfig],
    worker: Mapping[str, str],
    workers: int,
    wanted: str,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(ray_places, "RESERVED_S", 1.0)
    with pytest.raises(ConfigError, match=f"has not {wanted} on one node") as raised:
        async with reserve(load(kind, worker), workers):
            pass
    assert f"--workers {workers}: " in str(raised.value) and "4 CPU are free" in str(raised.value)
