"""Runs every service as a separate process over TCP, as deploy/compose.yaml does."""

import json
import os
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from tempfile import TemporaryDirectory

from foretoken.running.children.processes import Child
from foretoken.running.children.supervisor import supervise
from foretoken.running.console import status
from foretoken.running.console.progress import StartProgress
from foretoken.running.options import (
    Sections,
    ServeOptions,
    local_worker,
    predictor_sections,
    sections,
)
from foretoken.running.ports import free_ports
from foretoken.running.shutdown import interruptible_start
from services.runtime.channel import connect
from services.runtime.config import COMMON
from services.runtime.server import Lifecycle
from services.runtime.tasks import background

# A scheduler that exits is restarted within this time even on a busy machine; requests wait for it.
SCHEDULER_WAIT = {"scheduler_wait_s": "30"}
ADVISERS = ("predictor", "batcher", "estimator")


def assign_addresses(overrides: Sections, workers: int) -> list[tuple[str, str, Sections]]:
    """Returns (section, module, overrides) of every process, in start order, with addresses.

    Internal services listen on free loopback ports unless `--set` names an address.
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
    shared: dict[str, Sections] = {
        "predictor": {"log": predictor["log"]},
        "worker": {"emulation": overrides["emulation"]},
    }
    common = {name: overrides[name] for name in COMMON}
    # The supervisor reports what matters about its children.
    quiet = {"log_level": "WARNING", "started_by": str(os.getpid())}
    return [
        (name, module, {name: quiet | settings, **shared.get(name, {}), **common})
        for name, module, settings in units
    ]


def _with_ports(gateway: dict[str, str], free: Iterator[int]) -> dict[str, str]:
    """Replaces port 0 by a free port, since the ready line prints it."""
    ports = {key: gateway[key] for key in ("http_port", "grpc_port")}
    return gateway | {key: port if int(port) else str(next(free)) for key, port in ports.items()}


def _children(units: list[tuple[str, str, Sections]]) -> list[Child]:
    """Returns the children; a worker's name is its id."""
    return [
        Child(overrides[section].get("worker_id", section), section, module, overrides)
        for section, module, overrides in units
    ]


async def serve_separate(options: ServeOptions, lifecycle: Lifecycle) -> None:
    """Serves until a signal. Raises Interrupted if it arrives before the system is ready."""
    units = assign_addresses(sections(options), options.workers)
    gateway = units[-1][2]["gateway"]
    host = gateway["host"]
    http, grpc = f"http://{host}:{gateway['http_port']}", f"{host}:{gateway['grpc_port']}"
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="foretoken-"))
        # Metrics are read over this socket, which needs no API key.
        gateway["socket"] = socket = f"{folder}/gateway.sock"
        progress = stack.enter_context(closing(StartProgress()))
        end_start = await stack.enter_async_context(interruptible_start(lifecycle))
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
        supervisor = await stack.enter_async_context(
            supervise(_children(units), lifecycle, progress.update)
        )
        fleet = await status.wait_for_workers(scheduler, lambda: supervisor.count("worker"))
        await status.wait_until_healthy(f"{http}/health")
        await status.wait_for_predictor(predictor, lifecycle)
        supervisor.finish_start()
        end_start()
        progress.close()
        print(status.ready_line(fleet, http, grpc), flush=True)
        async with background(status.show(scheduler, status.scrape_over(front))):
            await lifecycle.draining.wait()
        async with status.reporting_drain(status.live_counter(scheduler)):
            await supervisor.stop(("gateway",))
        await supervisor.stop(("worker", "scheduler"))
        await supervisor.stop(ADVISERS)
