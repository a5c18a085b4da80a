"""The system under test: every service a process of its own, and a proxy between them."""

import asyncio
import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from tests.faults.clock.sitecustomize import CLOCK_VARIABLE
from tests.faults.proxy import Link, Proxy, proxying
from tests.live import Live, serving
from tests.system.children import children
from tests.system.faults.killed_processes import MODULES, metric, series

WORKERS = ("worker-0", "worker-1")
CONNECTED = (*WORKERS, "scheduler", "predictor", "batcher", "estimator")  # other processes connect
PROCESSES = (*CONNECTED, "gateway")
MACHINE = "machine"  # all processes
HOOK = Path(__file__).parent / "clock"  # in the PYTHONPATH of all processes
SETTLED_S = 240.0  # generous: the machine may be busy, and processes may be starting
POLL_S = 0.05
COUNTS = ("scheduler_requests_waiting", "scheduler_requests_running", "num_requests_running",
          "num_requests_waiting")  # fmt: skip
OPTIONS = ("--separate", f"--workers={len(WORKERS)}", "--dtype=float32", "--kv-tokens=2048")


@dataclass(frozen=True)
class System:
    """A running system. `addresses` are those of the processes that others connect to. Its wall
    clock is ahead by the seconds in the file `clock`, if there is one."""

    live: Live
    output: Path  # its stderr
    clock: Path
    proxy: Proxy
    addresses: Mapping[str, str]

    def link(self, name: str) -> Link:
        """All connections to the process."""
        return self.proxy.links[self.addresses[name]]

    def pids(self, name: str) -> list[int]:
        return find_processes(self.live, name)

    def times_back(self, name: str) -> int:
        """How often the process, or one of several gateways, has served again after an end."""
        return len(re.findall(rf"\b{name}(-\d+)? is back after", self.output.read_text()))

    async def settle(self) -> None:
        """Waits until all workers serve, no request is left, and all of their memory is free."""
        try:
            await eventually(lambda: not _unsettled(self.live))
        except TimeoutError:
            raise AssertionError(await asyncio.to_thread(_unsettled, self.live)) from None


def find_processes(live: Live, name: str) -> list[int]:
    """Ids of the processes of a name: one, none while it restarts, or those of several gateways."""
    section = name.partition("-")[0]
    found = sorted(children(live.process.pid, MODULES[section]))
    if name not in WORKERS:
        return found
    return [pid for pid in found if _setting(pid, "worker.worker_id") == name]


async def eventually(condition: Callable[[], bool]) -> None:
    """Polls a condition, which may take its time, until it is true."""
    async with asyncio.timeout(SETTLED_S):
        while not await asyncio.to_thread(condition):  # noqa: ASYNC110 - there is no event
            await asyncio.sleep(POLL_S)


@asynccontextmanager
async def running_system(folder: Path, *options: str) -> AsyncIterator[System]:
    """The system, ready. `options` are more of `foretoken serve`. Its files are in the folder."""
    output, clock = folder / "stderr", folder / "clock"
    paths = (str(HOOK), os.environ.get("PYTHONPATH"))
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        CLOCK_VARIABLE: str(clock),
        "XDG_STATE_HOME": str(folder / "state"),
    }
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(proxying())
        variables["grpc_proxy"] = proxy.url
        starting = serving(*OPTIONS, *options, stderr=output, variables=variables)
        live = await asyncio.to_thread(starting.__enter__)
        try:
            addresses = {
                name: _setting(find_processes(live, name)[0], f"{name.partition('-')[0]}.address")
                for name in CONNECTED
            }
            yield System(live, output, clock, proxy, addresses)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


def _setting(pid: int, key: str) -> str:
    """The value of a setting in the arguments of a process; empty if it has ended."""
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return ""
    values = [each.removeprefix(f"{key}=") for each in arguments if each.startswith(f"{key}=")]
    return values[-1] if values else ""


def _unsettled(live: Live) -> str:
    """What is not as in an idle system; empty if it is idle."""
    try:
        attached = metric(live, "foretoken_workers_attached")
        blocks = [
            series(live, "foretoken_kv_blocks", f'state="{state}"') for state in ("held", "resting")
        ]
        counts = {name: metric(live, f"foretoken_{name}") for name in COUNTS}
    except (OSError, HTTPException) as error:
        return f"/metrics: {error}"
    full = all(len(each) == len(WORKERS) and not any(each) for each in blocks)
    if attached == len(WORKERS) and full and not any(counts.values()):
        return ""
    return f"workers {attached}, blocks held and resting {blocks}, requests {counts}"
