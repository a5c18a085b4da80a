"""Two schedulers of one lease, two emulated workers and a gateway, each a process."""

import asyncio
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from foretoken.running.ports import free_ports
from services.runtime.healthcheck import check
from tests.live import ROOT, environment
from tests.redis_server import RedisServer, url

STEP_S = 0.005
BACK_S = 60.0  # a test machine may be busy
LEASE_S = 4.0  # a leader that a busy machine stops for half of it still leads
EMULATION = {
    "hardware": "a test's device",
    "base_s": STEP_S,
    "prefill_token_s": 1e-5,
    "offload_token_s": 1e-7,
    "upload_token_s": 1e-7,
    "host_tokens": 4_096,
}
WORKER = {"model": "models/demo", "kv_tokens": 8_192, "max_running": 32, "report_every_steps": 4}


@dataclass
class SchedulerProcess:
    """One scheduler, which can be started again after its end."""

    address: str
    metrics_port: int
    command: list[str]
    errors: IO[str]
    process: "subprocess.Popen[bytes]"

    @property
    def leads(self) -> bool:
        return self.process.poll() is None and check(self.address) == "SERVING"

    @property
    def leads_both_workers(self) -> bool:
        return self.leads and self.value("workers_attached") == 2

    def start(self) -> None:
        self.process = start(self.command, self.errors)

    def value(self, name: str) -> float:
        """The value of its only series with this name."""
        page = f"http://127.0.0.1:{self.metrics_port}/metrics"
        text = urllib.request.urlopen(page, timeout=30).read().decode()
        [line] = [x for x in text.splitlines() if x.startswith(f"foretoken_{name} ")]
        return float(line.split()[-1])


class StandbySystem:
    """The processes, and the gateway's gRPC address. Their stderr goes to one file."""

    def __init__(self, redis: RedisServer, folder: Path):
        self.output = folder / "stderr"
        self._errors = self.output.open("w")
        ports = free_ports(8)
        addresses = [f"127.0.0.1:{port}" for port in ports]
        self.grpc = addresses[7]
        listed = ",".join(addresses[:2])
        gone = {"predictor_address": addresses[6], "estimator_address": addresses[6]}
        self.schedulers = [
            self._scheduler(
                {"address": address, "metrics_port": port, "lease_url": url(redis.port)}
                | {"lease_s": LEASE_S, **gone}
            )
            for address, port in zip(addresses[:2], ports[2:4], strict=True)
        ]
        emulation = _sets("emulation", EMULATION)
        workers = [
            WORKER | {"worker_id": f"w{n}", "address": address, "scheduler_address": listed}
            for n, address in enumerate(addresses[4:6])
        ]
        gateway = {"grpc_port": ports[7], "http_port": 0, "scheduler_address": listed}
        self._others = [
            *(
                start(_module("services.worker", _sets("worker", each), emulation), self._errors)
                for each in workers
            ),
            start(_module("gateway", _sets("gateway", gateway)), self._errors),
        ]

    def _scheduler(self, settings: Mapping[str, object]) -> SchedulerProcess:
        command = _module("services.scheduler", _sets("scheduler", settings))
        address, port = str(settings["address"]), int(str(settings["metrics_port"]))
        process = start(command, self._errors)
        return SchedulerProcess(address, port, command, self._errors, process)

    async def wait_for_gateway(self) -> None:
        await eventually(lambda: check(self.grpc) == "SERVING")

    async def leader_and_standby(self) -> tuple[SchedulerProcess, SchedulerProcess]:
        """Once one leads both workers, and the other runs."""
        by_status: dict[str, SchedulerProcess] = {}

        def settled() -> bool:
            by_status.clear()
            by_status.update((check(each.address), each) for each in self.schedulers)
            return (
                by_status.keys() == {"SERVING", "NOT_SERVING"}
                and by_status["SERVING"].value("workers_attached") == 2
            )

        try:
            await eventually(settled)
        except AssertionError:
            ends = [each.process.poll() for each in self.schedulers]
            last = "\n".join(self.output.read_text().splitlines()[-20:])
            raise AssertionError(f"{[*by_status]}, exit statuses {ends}, log: {last}") from None
        return by_status["SERVING"], by_status["NOT_SERVING"]

    def stop(self) -> None:
        running = [*(each.process for each in self.schedulers), *self._others]
        for process in running:
            process.kill()
            process.wait()
        self._errors.close()


async def eventually(condition: Callable[[], bool]) -> float:
    """Polls a condition, which may take its time, until it is true; returns seconds."""
    began_s = time.monotonic()
    while not await asyncio.to_thread(condition):
        assert time.monotonic() < began_s + BACK_S, f"{condition} is not true after {BACK_S} s"
        await asyncio.sleep(0.01)
    return time.monotonic() - began_s


def start(command: list[str], errors: IO[str]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, stderr=errors, env=environment(), cwd=ROOT)


def _module(name: str, *words: list[str]) -> list[str]:
    return [sys.executable, "-m", name, *(word for each in words for word in each)]


def _sets(section: str, settings: Mapping[str, object]) -> list[str]:
    return [
        word for key, value in settings.items() for word in ("--set", f"{section}.{key}={value}")
    ]
