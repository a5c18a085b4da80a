"""Two real worker processes, shared by tests that each start a control plane of their own.

A worker takes seconds to start and a control plane does not: the workers start once, and attach to
the control plane of each test in turn (scheduler, estimator, predictor and gateway, wired as
`foretoken serve` does).
"""

import asyncio
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO

from prometheus_client import CollectorRegistry

from foretoken import AsyncClient
from foretoken.running.control import ControlPlane, build_control_plane
from foretoken.running.options import ServeOptions, chosen_preset, demo_model, sections
from foretoken.running.ports import free_port
from gateway.faces.grpc.service import mount
from services.policies.preset import Preset
from services.predictor.config import PredictorConfig
from services.predictor.predictors import READS
from services.predictor.service import PredictorService
from services.runtime.config import load
from services.runtime.server import listening
from services.runtime.tasks import background
from services.worker.config import WorkerConfig
from tests.live import ROOT, environment
from tests.predictor.predictor_serving import ADD, NAME, real_encoder
from tests.reach import reaching, until

WORKERS = 2
ATTACHED_S = 60.0  # a test machine may be busy
SETTINGS: Mapping[str, object] = {
    "profile_s": 0.2,
    "reconnect_s": 0.2,  # the next control plane starts at once
    "orphaned_s": 120.0,
    "exit_when_orphaned": True,
    "host_gib": 0.25,
    "report_every_steps": 4,
    "log_level": "ERROR",
}


@dataclass(frozen=True)
class Workers:
    """The folder of the scheduler's socket, and the URL of each worker's metrics."""

    folder: Path
    metrics: tuple[str, ...]

    @property
    def scheduler(self) -> str:
        return f"unix:{self.folder}/scheduler.sock"

    def total_of(self, name: str) -> float:
        """The value of a counter, summed over the workers."""
        return sum(_total_of(url, f"foretoken_{name}_total") for url in self.metrics)


@dataclass(frozen=True)
class System:
    """A running control plane and a client of its gateway."""

    control: ControlPlane
    client: AsyncClient
    preset: Preset
    registry: CollectorRegistry

    def total_of(self, name: str) -> float:
        """The value of a counter, summed over its labels."""
        families = (f for f in self.registry.collect() if f.name == f"foretoken_{name}")
        samples = (s for family in families for s in family.samples)
        return sum(s.value for s in samples if s.name.endswith("_total"))

    @property
    def empty(self) -> bool:
        """The scheduler holds no job, and every worker reports all memory free."""
        state = self.control.scheduler.state
        return not state.jobs and all(w.used_tokens == 0 for w in state.workers.values())


@contextmanager
def running_workers(kv_tokens: int) -> Iterator[Workers]:
    """WORKERS processes with `kv_tokens` of KV each; they start without a scheduler."""
    with TemporaryDirectory(prefix="foretoken-") as name:
        folder = Path(name)
        ports = [free_port() for _ in range(WORKERS)]
        urls = tuple(f"http://127.0.0.1:{port}/metrics" for port in ports)
        workers = Workers(folder, urls)
        with TemporaryFile("w+") as errors:
            processes = [
                _start(workers, number, port, kv_tokens, errors)
                for number, port in enumerate(ports)
            ]
            try:
                yield workers
            finally:
                ended = [process.poll() for process in processes]
                for process in processes:
                    process.kill()
                    process.wait()
                errors.seek(0)
                assert ended == [None] * WORKERS, f"a worker ended by itself: {errors.read()}"


def _start(
    workers: Workers, number: int, port: int, kv_tokens: int, errors: IO[str]
) -> "subprocess.Popen[bytes]":
    settings = {
        **SETTINGS,
        "worker_id": f"worker-{number}",
        "address": f"unix:{workers.folder}/worker-{number}.sock",
        "scheduler_address": workers.scheduler,
        "metrics_port": port,
        "model": demo_model(),
        "dtype": "float32",  # answers equal the engine's, whatever the batch
        "kv_tokens": kv_tokens,
    }
    sets = {key: str(value) for key, value in settings.items()}
    load(WorkerConfig, sets)
    words = [word for key, value in sets.items() for word in ("--set", f"worker.{key}={value}")]
    command = [sys.executable, "-m", "services.worker", *words]
    return subprocess.Popen(command, stderr=errors, env=environment(), cwd=ROOT)


@asynccontextmanager
async def running_system(
    workers: Workers, policy: str, choices: Mapping[str, object], oracle_file: str = ""
) -> AsyncIterator[System]:
    """A control plane with all workers attached; `choices` replace those of its preset. The
    predictor runs in this process; a predictor that reads prompts uses the real encoder within a
    small CPU budget, and models are not refitted, which would take longer than the load."""
    sets = [f"preset.{key}={value}" for key, value in choices.items()]
    overrides = sections(ServeOptions(policy=policy, http_port=0, grpc_port=0, sets=sets))
    preset = chosen_preset(overrides)
    registry = CollectorRegistry()
    async with AsyncExitStack() as stack:
        predictor = PredictorService(
            PredictorConfig(
                model=preset.predictor,
                oracle_file=oracle_file,
                cpu_saved_s=0.1,
                refit_interval_s=3_600,
                refit_examples_min=20_000,
            ),
            CollectorRegistry(),
            encoder=real_encoder() if preset.predictor in READS else None,
        )
        await stack.enter_async_context(background(predictor.run()))
        channel = await stack.enter_async_context(reaching("in-process", NAME, ADD, predictor))
        control = build_control_plane(overrides, channel, registry)
        scheduler, front = control.scheduler, control.front
        await stack.enter_async_context(background(scheduler.run(), front.run()))
        await stack.enter_async_context(listening([control.scheduler_mount], workers.scheduler))
        server = await stack.enter_async_context(listening([mount(front)], "127.0.0.1:0"))
        await until(lambda: len(scheduler.state.workers) == WORKERS, ATTACHED_S)
        client = await stack.enter_async_context(AsyncClient(f"127.0.0.1:{server.port}"))
        yield System(control, client, preset, registry)


def _total_of(url: str, name: str) -> float:
    answer = urllib.request.urlopen(url, timeout=30).read().decode()
    found = [x for x in answer.splitlines() if x.startswith((f"{name} ", f"{name}{{"))]
    assert found, f"{url} has no metric {name}"
    return sum(float(line.split()[-1]) for line in found)


async def total_of(workers: Workers, name: str) -> float:
    return await asyncio.to_thread(workers.total_of, name)
