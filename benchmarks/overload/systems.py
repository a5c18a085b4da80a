"""The measured systems: presets of foretoken, and vLLM as a peer."""

import asyncio
import time
from atexit import register
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory, mkdtemp

from benchmarks.harness.system import (
    System,
    foretoken_system,
    read_metrics,
    settings,
    vllm_server,
)
from benchmarks.overload.demo_load import write_lengths
from benchmarks.overload.padded_model import write_padded
from foretoken.running.options import demo_model
from services.policies.preset import presets

SYSTEMS: dict[str, tuple[str, ...]] = {
    "fcfs": ("scheduler.policy=fcfs",),
    "past-future": ("scheduler.policy=past-future",),
    "alise": ("scheduler.policy=alise",),
    "alise-blend": ("scheduler.policy=alise", "predictor.model=blend"),
}
PEER = "vllm"
KV_TOKENS = 3_072
IDLE_S = 30.0  # maximum wait until disconnected requests have left


def knows_lengths(name: str) -> bool:
    """Returns whether the preset's predictor is an oracle."""
    rows = presets()
    return name in rows and rows[name].predictor == "oracle"


@cache
def _lengths_file() -> Path:
    """Writes the oracle's file once per run, in a temporary folder."""
    folder = Path(mkdtemp(prefix="foretoken-lengths-"))
    register(rmtree, folder, ignore_errors=True)
    write_lengths(folder / "lengths.jsonl")
    return folder / "lengths.jsonl"


@dataclass(frozen=True)
class ServedModel:
    """The model of every system and its dtype, and the Python that runs vLLM."""

    folder: str = ""  # empty: the demo model
    dtype: str = "float32"
    peer_python: str = ""


@contextmanager
def serving(name: str, model: ServedModel) -> Iterator[System]:
    """Runs one of SYSTEMS, another policy by its name, or the peer."""
    if name == PEER:
        with vllm_server(model.peer_python, KV_TOKENS, model.folder, model.dtype) as peer:
            yield peer
        return
    # The log is in memory: a preset's predictor must not learn from another preset's run.
    choices = (*SYSTEMS.get(name, (f"scheduler.policy={name}",)), "log.path=")
    if knows_lengths(name):
        choices += (f"predictor.oracle_file={_lengths_file()}",)
    served = ("--dtype", model.dtype, *(("--model", model.folder) if model.folder else ()))
    with foretoken_system("--kv-tokens", str(KV_TOKENS), *served, *settings(*choices)) as system:
        yield system


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
