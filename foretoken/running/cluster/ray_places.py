"""Workers as actors of a Ray cluster: one bundle of a placement group for each of them.

The bundles are spread over the nodes. A worker that exits is started again in its bundle by the
supervisor; when a node is lost, Ray moves its bundles to other nodes with free resources.
"""

import asyncio
import logging
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from foretoken.running.children.processes import Child, Exit, Messages, OnStage
from foretoken.running.cluster.places import Places
from foretoken.running.cluster.ray_host import WorkerHost
from foretoken.running.ports import free_port
from foretoken.running.shutdown import run_in_daemon_thread
from services.runtime.config import COMMON, ENV_PREFIX, ConfigError
from services.runtime.network.channel import host_port
from services.runtime.server import Lifecycle
from services.runtime.tasks import run_to_completion
from services.worker.config import WorkerConfig

CONNECTED_S = 30.0
RESERVED_S = 60.0  # for free resources, and for nodes that are starting
KILLED_S = 2.0  # for the answer of a node to a kill
SECTIONS = ("worker", "emulation", *COMMON)  # that a worker reads

Resources = Mapping[str, float]


@asynccontextmanager
async def reserve(worker: WorkerConfig, workers: int) -> AsyncIterator[Places]:
    """Places for the workers while the block runs, on the cluster that this machine is a node of,
    or that RAY_ADDRESS names. Raises ConfigError if there is none, or none with free resources."""
    # In a thread, because Ray would replace the main thread's handler of SIGTERM, and tries an
    # address that does not answer for minutes.
    connecting = asyncio.wrap_future(run_in_daemon_thread(_connect))
    try:
        await asyncio.wait_for(connecting, CONNECTED_S)
    except TimeoutError:
        raise ConfigError(_no_cluster(f"no answer within {CONNECTED_S:g} s")) from None
    try:
        resources = _resources_of_one(worker)
        group = placement_group([dict(resources)] * workers, strategy="SPREAD")
        try:
            if not await asyncio.to_thread(group.wait, RESERVED_S):
                raise ConfigError(_missing(resources, workers))
            yield await _places(group, resources, workers)
        finally:
            remove_placement_group(group)
    finally:
        await asyncio.to_thread(ray.shutdown)


def _connect() -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        ray.init("auto", log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(_no_cluster(str(error).strip().partition(". ")[0])) from None


def _no_cluster(cause: str) -> str:
    return (
        f"--cluster ray finds no Ray cluster ({cause}); start one with `ray start --head` here and "
        "`ray start --address=HOST:6379` on other machines, or set RAY_ADDRESS"
    )


def _resources_of_one(config: WorkerConfig) -> Resources:
    """GPUs if the cluster has some and the device may be one, and the CPUs of its threads."""
    cpus = max(1, config.torch_threads)
    if config.device != "cpu" and ray.cluster_resources().get("GPU", 0):
        return {"CPU": cpus, "GPU": config.tensor_parallel}
    return {"CPU": cpus * config.tensor_parallel}


def _missing(resources: Resources, workers: int) -> str:
    free = ray.available_resources()
    wanted = ", ".join(f"{count:g} {name}" for name, count in resources.items())
    found = ", ".join(f"{free.get(name, 0):g} {name}" for name in resources)
    return (
        f"--workers {workers}: the Ray cluster has not {wanted} on one node for each of them after "
        f"{RESERVED_S:g} s; {found} are free: start fewer workers, or add nodes"
    )


async def _places(group: Any, resources: Resources, workers: int) -> Places:
    """The addresses of all places, from a task in each bundle."""
    here = get_node_ip_address()
    find = ray.remote(_find_place)
    bundles = [_in_bundle(group, resources, number) for number in range(workers)]
    found = await asyncio.gather(*(find.options(**each).remote() for each in bundles))
    beside = Counter(host for host, _ in found)
    settings = [
        {
            "address": host_port(host, port),
            "local_rank": "0",  # Ray shows a worker only the GPUs of its bundle
            "local_workers": str(beside[host]),
        }
        for host, port in found
    ]
    by_name = {f"worker-{number}": each for number, each in enumerate(bundles)}
    scheduler = {"address": host_port(here, free_port(here))}
    return Places(partial(_launch, by_name), settings, scheduler)


def _in_bundle(group: Any, resources: Resources, number: int) -> dict[str, Any]:
    """Ray's options of a task or an actor in a worker's bundle."""
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=number)
    return {
        "num_cpus": resources["CPU"],
        "num_gpus": resources.get("GPU", 0),
        "scheduling_strategy": strategy,
    }


def _find_place() -> tuple[str, int]:
    """The address of this node, and a free port."""
    host = get_node_ip_address()
    return host, free_port(host)


class _RemoteHost(WorkerHost):
    """WorkerHost on the node where Ray has placed it."""

    def __init__(self) -> None:
        super().__init__(get_node_ip_address())


class RemoteProcess:
    """A worker's process on a node of the cluster."""

    def __init__(self, child: Child, host: Any, started: Awaitable[None], on_stage: OnStage):
        self._started = started
        self._host, self._messages = host, Messages(child, on_stage)
        self._reading = asyncio.create_task(self._read())

    async def wait(self) -> Exit:
        return await asyncio.shield(self._reading)

    async def stop(self, lifecycle: Lifecycle, grace_s: float) -> None:
        """Also ends the actor, which frees the bundle."""
        if not self._reading.done():
            self._host.terminate.remote()
            if lifecycle.aborting.is_set() or not await lifecycle.drain(self._ended(), grace_s):
                with suppress(RayError, TimeoutError):
                    await asyncio.wait_for(self._host.kill.remote(), KILLED_S)
        self._reading.cancel()
        await asyncio.to_thread(_kill, self._host)

    async def _ended(self) -> None:
        await asyncio.wait({self._reading})

    async def _read(self) -> Exit:
        try:
            await self._started
            while lines := await self._host.read.remote():
                for line in lines:
                    self._messages.take(line)
            return Exit(await self._host.status.remote(), self._messages.reason)
        except RayError as error:
            return Exit(-signal.SIGKILL, _reason(error))


def _reason(error: RayError) -> str:
    """Why a worker is given up; of a remote traceback its last line."""
    if isinstance(error, RayActorError):
        return "its node or its actor is lost"
    return f"Ray: {(str(error).strip() or type(error).__name__).splitlines()[-1]}"


def _kill(host: Any) -> None:
    """Ends an actor; one that is gone already, or that nothing reaches, stays as it is."""
    with suppress(RayError):
        ray.kill(host)


async def _launch(
    bundles: Mapping[str, dict[str, Any]], child: Child, on_stage: OnStage
) -> RemoteProcess:
    """Starts a worker in its bundle. Waits while the bundle has no node; leaves no actor behind
    when cancelled."""
    environment = {
        name: value
        for section in SECTIONS
        for name, value in os.environ.items()
        if name.startswith(f"{ENV_PREFIX}{section}_".upper())
    }
    host: Any = ray.remote(_RemoteHost).options(**bundles[child.name]).remote()
    started = host.start.remote(child.module, child.overrides, environment)
    try:
        with suppress(RayError):  # the process reports it as its exit
            await started
    except BaseException:
        await run_to_completion(asyncio.to_thread(_kill, host))
        raise
    return RemoteProcess(child, host, started, on_stage)
