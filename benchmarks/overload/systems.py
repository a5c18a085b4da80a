"""The measured systems: presets of foretoken, and vLLM as a peer."""

import asyncio
import time
from atexit import register
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp

from benchmarks.harness.system import (
    GIB,
    VLLM_BLOCK_TOKENS,
    System,
    foretoken_system,
    read_metrics,
    settings,
    vllm_server,
)
from benchmarks.overload.demo_load import MEDIAN_TOKENS, demo_pool
from benchmarks.overload.prompt_pool import PromptPool, file_pool
from foretoken.running.options import demo_model
from models.padded import write_padded
from services.policies.preset import presets
from services.worker.config import WorkerConfig
from simulator.hardware.hardware import Hardware
from simulator.hardware.hardware_file import load_hardware

SYSTEMS: dict[str, tuple[str, ...]] = {
    "fcfs": ("scheduler.policy=fcfs",),
    "past-future": ("scheduler.policy=past-future",),
    "alise": ("scheduler.policy=alise",),
    "alise-blend": ("scheduler.policy=alise", "predictor.model=blend"),
}
PEER = "vllm"
INSIDE = f"{PEER}+"  # and a preset: foretoken.vllm schedules inside vLLM by it
# vLLM's policy `priority`, with the class of the true length as the priority of a request: what a
# router before vLLM can do that always recognises the class. CLASSES are their longest answers.
BY_CLASS = f"{PEER}-priority"
CLASSES = (25, 100)
PEERS = {PEER: (), BY_CLASS: ("--scheduling-policy", "priority")}
ENGINE = f"{PEER}-engine+"  # and a preset: foretoken serve --engine vllm by it
ENGINE_SETTINGS = (
    f"worker.block_tokens={VLLM_BLOCK_TOKENS}",
    f'worker.vllm_args={{"kv_cache_memory_bytes": {GIB}}}',
)
KV_TOKENS = 3_072
DTYPES = ("float32", "bfloat16")
MAX_RUNNING = WorkerConfig().max_running
IDLE_S = 30.0  # maximum wait until disconnected requests have left


def knows_lengths(name: str) -> bool:
    """Returns whether true lengths decide: the preset's predictor is an oracle, or the client says
    the class."""
    rows = presets()
    return name == BY_CLASS or (name in rows and rows[name].predictor == "oracle")


@dataclass(frozen=True)
class ServedModel:
    """What every system serves: a model with its dtype, or emulated hardware with a file of prompts
    and the lengths of their answers; the number of workers; and the Python that runs vLLM.

    Raises ValueError with a sentence for unknown hardware or a file that cannot be used.
    """

    folder: str = ""  # empty: the demo model
    dtype: str = DTYPES[0]
    peer_python: str = ""
    emulate: str = ""  # a name or a file; empty: the model computes
    prompts: str = ""  # empty: those of the demo model
    workers: int = 1

    @cached_property
    def hardware(self) -> Hardware | None:
        return load_hardware(self.emulate) if self.emulate else None

    @cached_property
    def pool(self) -> PromptPool:
        if self.hardware and self.prompts:
            return file_pool(self.prompts, self.hardware.max_context_tokens)
        return demo_pool()

    @property
    def kv_tokens(self) -> int:
        """Of each worker."""
        return self.hardware.kv_tokens if self.hardware else KV_TOKENS

    @property
    def max_running(self) -> int:
        """Of each worker."""
        return self.hardware.max_running if self.hardware else MAX_RUNNING

    @property
    def median_tokens(self) -> float:
        """Of the answers that are drawn."""
        return self.pool.median_tokens if self.prompts else MEDIAN_TOKENS

    @cached_property
    def lengths_file(self) -> Path:
        """A file with the lengths of all answers, written once per run in a temporary folder."""
        folder = Path(mkdtemp(prefix="foretoken-lengths-"))
        register(rmtree, folder, ignore_errors=True)
        self.pool.write_lengths(folder / "lengths.jsonl")
        return folder / "lengths.jsonl"

    @property
    def arguments(self) -> list[str]:
        """Of `foretoken serve`."""
        workers = ["--workers", str(self.workers)]
        if self.emulate:
            lengths = str(self.lengths_file)
            return ["--emulate", self.emulate, "--emulate-lengths", lengths, *workers]
        folder = ["--model", self.folder] if self.folder else []
        return ["--kv-tokens", str(self.kv_tokens), "--dtype", self.dtype, *folder, *workers]


@contextmanager
def serving(name: str, model: ServedModel) -> Iterator[System]:
    """Runs one of SYSTEMS, another policy by its name, or a peer."""
    if name.startswith(ENGINE):
        preset = f"scheduler.policy={name.removeprefix(ENGINE)}"
        given = settings(preset, "log.path=", *ENGINE_SETTINGS)
        arguments = ("--engine", "vllm", *model.arguments, *given)
        with foretoken_system(*arguments, python=model.peer_python) as system:
            yield system
        return
    if name.startswith(PEER):
        ours = name.startswith(INSIDE)
        inside = PEERS.get(name, ("--scheduler-cls", "foretoken.vllm.Scheduler"))
        variables = {"FORETOKEN_POLICY": name.removeprefix(INSIDE)} if ours else {}
        with vllm_server(
            model.peer_python,
            KV_TOKENS,
            model.folder,
            model.dtype,
            arguments=inside,
            variables=variables,
        ) as peer:
            yield peer
        return
    # The log is in memory: a preset's predictor must not learn from another preset's run.
    choices = (*SYSTEMS.get(name, (f"scheduler.policy={name}",)), "log.path=")
    if knows_lengths(name):
        choices += (f"predictor.oracle_file={model.lengths_file}",)
    with foretoken_system(*model.arguments, *settings(*choices)) as system:
        yield system


def bodies_for(name: str, model: ServedModel, count: int, seed: int) -> list[bytes]:
    """The requests of this system: equal arguments draw the same prompts for every system."""
    return model.pool.draw_bodies(count, seed, classes=CLASSES if name == BY_CLASS else ())


@contextmanager
def padded_demo_model() -> Iterator[str]:
    """Writes the padded demo model into a temporary folder; its served name is the same."""
    with TemporaryDirectory(prefix="foretoken-padded-") as folder:
        padded = Path(folder, "demo")
        write_padded(Path(demo_model()), padded)
        yield str(padded)


async def wait_until_idle(url: str) -> None:
    """Returns when no request runs or is queued, or after IDLE_S."""
    deadline_s = time.monotonic() + IDLE_S
    while time.monotonic() < deadline_s:
        metrics = await asyncio.to_thread(read_metrics, url)
        if metrics["num_requests_running"] + metrics["num_requests_waiting"] == 0:
            return
        await asyncio.sleep(0.25)
