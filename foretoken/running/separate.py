"""Every service a process of its own, over TCP, as deploy/compose.yaml runs them."""

import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from tempfile import TemporaryDirectory

from foretoken.running.children.minding import minding
from foretoken.running.children.processes import Child
from foretoken.running.leaving import starting
from foretoken.running.options import (
    Sections,
    ServeOptions,
    local_worker,
    predictor_sections,
    sections,
)
from foretoken.running.ports import free_ports
from foretoken.running.told import status
from foretoken.running.told.progress import Progress
from services.runtime.channel import connect
from services.runtime.config import COMMON
from services.runtime.server import Lifecycle
from services.runtime.tasks import background

# A scheduler that died is back within this time, on a busy machine, too; requests wait for it.
SCHEDULER_WAIT = {"scheduler_wait_s": "30"}
ADVISERS = ("predictor", "batcher", "estimator")


def wire(overrides: Sections, workers: int) -> list[tuple[str, str, Sections]]:
    """(section, module, overrides) of every process, in starting order, with addresses filled in.

    Internal services listen on free ports of the loopback unless `--set` says where.
    """
    ports = iter(free_ports(len(ADVISERS) + 1 + workers + 2))
    addresses = {
        name: overrides[name].get("address", f"127.0.0.1:{next(ports)}")
        for name in (*ADVISERS, "scheduler")
    }
    predictor = predictor_sections(overrides, {"address": addresses["predictor"]})
    own: dict[str, dict[str, str]] = {
        "predictor": predictor["predictor"],
        "batcher": {},
        "estimator": {},
        "scheduler": {f"{name}_address": addresses[name] for name in ADVISERS},
    }
    units = [
        (name, f"services.{name}", {"address": addresses[name]} | settings | overrides[name])
        for name, settings in own.items()
    ]
    to_scheduler = {"scheduler_address": addresses["scheduler"]}
    served = overrides["gateway"].get("served_model_name", "")
    for number in range(workers):
        address = f"127.0.0.1:{next(ports)}"
        settings = {"address": address} | local_worker(number, workers)
        settings |= {"served_model_name": served} | to_scheduler | overrides["worker"]
        units.append(("worker", "services.worker", settings))
    peers = [settings.get("advertise") or settings["address"] for _, _, settings in units]
    gateway = to_scheduler | SCHEDULER_WAIT | {"metrics_peers": json.dumps(peers)}
    units.append(("gateway", "gateway", gateway | _with_ports(overrides["gateway"], ports)))
    shared: dict[str, Sections] = {"predictor": {"log": predictor["log"]}}
    common = {name: overrides[name] for name in COMMON}
    # What matters is told by the one who started them, and who minds them.
    quiet = {"log_level": "WARNING", "started_by": str(os.getpid())}
    return [
        (name, module, {name: quiet | settings, **shared.get(name, {}), **common})
        for name, module, settings in units
    ]


def _with_ports(gateway: dict[str, str], free: Iterator[int]) -> dict[str, str]:
    """Port 0 made a real one, since the ready line names it."""
    ports = {key: gateway[key] for key in ("http_port", "grpc_port")}
    return gateway | {key: port if int(port) else str(next(free)) for key, port in ports.items()}


def _children(units: list[tuple[str, str, Sections]]) -> list[Child]:
    """By their names; workers go by their ids."""
    return [
        Child(overrides[section].get("worker_id", section), section, module, overrides)
        for section, module, overrides in units
    ]


async def serve_separate(options: ServeOptions, lifecycle: Lifecycle) -> None:
    """Raises Interrupted where a signal comes before it is ready."""
    units = wire(sections(options), options.workers)
    gateway = units[-1][2]["gateway"]
    host = gateway["host"]
    http, grpc = f"http://{host}:{gateway['http_port']}", f"{host}:{gateway['grpc_port']}"
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="foretoken-"))
        # What it counts it tells there without a key: those of a file are known by their hashes.
        gateway["socket"] = socket = f"{folder}/gateway.sock"
        progress = stack.enter_context(closing(Progress()))
        is_ready = await stack.enter_async_context(starting(lifecycle))
        channels = [
            connect(address)
            for address in (
                units[0][2]["predictor"]["address"],
                gateway["scheduler_address"],
                f"unix:{socket}",
            )
        ]
        for channel in channels:
            stack.push_async_callback(channel.close)
        predictor, scheduler, front = channels
        minder = await stack.enter_async_context(
            minding(_children(units), lifecycle, progress.told)
        )
        fleet = await status.fleet_of(scheduler, lambda: minder.count("worker"))
        await status.healthy(f"{http}/health")
        await status.forecasting(predictor, lifecycle)
        minder.settle()
        is_ready()
        progress.close()
        print(status.ready_line(fleet, http, grpc), flush=True)
        async with background(status.show(scheduler, status.scraping(front))):
            await lifecycle.draining.wait()
        async with status.saying_what_is_left(status.live_of(scheduler)):
            await minder.stop(("gateway",))
        await minder.stop(("worker", "scheduler"))
        await minder.stop(ADVISERS)
