"""Every service a process of its own, over TCP, as deploy/compose.yaml runs them."""

from contextlib import AsyncExitStack

from foretoken import status
from foretoken.options import Sections, ServeOptions, local_worker, predictor_sections, sections
from foretoken.ports import free_port
from foretoken.processes import running
from services.runtime.channel import connect
from services.runtime.server import Lifecycle
from services.runtime.tasks import background

QUIET = {"log_level": "WARNING"}  # what matters is told by the one who started them
ADVISERS = ("predictor", "batcher", "estimator")


def wire(overrides: Sections, workers: int) -> list[tuple[str, str, Sections]]:
    """(section, module, overrides) of every process, in starting order, with addresses filled in.

    Internal services listen on free ports of the loopback unless `--set` says where.
    """
    addresses = {
        name: overrides[name].get("address", f"127.0.0.1:{free_port()}")
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
        address = f"127.0.0.1:{free_port()}"
        settings = {"address": address} | local_worker(number, workers)
        settings |= {"served_model_name": served} | to_scheduler | overrides["worker"]
        units.append(("worker", "services.worker", settings))
    units.append(("gateway", "gateway", to_scheduler | _with_ports(overrides["gateway"])))
    shared: dict[str, Sections] = {"predictor": {"log": predictor["log"]}}
    return [
        (name, module, {name: QUIET | settings, **shared.get(name, {})})
        for name, module, settings in units
    ]


def _with_ports(gateway: dict[str, str]) -> dict[str, str]:
    """Port 0 made a real one, since the ready line names it."""
    ports = {key: gateway[key] for key in ("http_port", "grpc_port")}
    return gateway | {key: port if int(port) else str(free_port()) for key, port in ports.items()}


async def serve_separate(options: ServeOptions, lifecycle: Lifecycle) -> None:
    units = wire(sections(options), options.workers)
    gateway = units[-1][2]["gateway"]
    scheduler = connect(gateway["scheduler_address"])
    async with AsyncExitStack() as stack:
        stack.push_async_callback(scheduler.close)
        for unit in units:
            await stack.enter_async_context(running(*unit, lifecycle))
        fleet = await status.fleet_of(scheduler, options.workers)
        host = gateway["host"]
        http, grpc = f"http://{host}:{gateway['http_port']}", f"{host}:{gateway['grpc_port']}"
        await status.healthy(f"{http}/health")
        print(status.ready_line(fleet, http, grpc), flush=True)
        async with background(status.show(scheduler)):
            await lifecycle.draining.wait()
