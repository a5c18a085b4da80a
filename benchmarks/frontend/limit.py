"""The limit of gateway processes: many streams of an emulated engine with steps of fixed time."""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from benchmarks.frontend.load import PATH, fixed_body
from benchmarks.frontend.stream_client import Arrivals, StreamingConnection, added_latency_s
from benchmarks.harness.cpu import FRONT_END, GATEWAY, read_cpu, spent
from benchmarks.harness.system import System, foretoken_system, read_metrics, settings
from foretoken.client.address import HttpAddress
from models.words import WORDS

STEP_S = 0.01  # of the engine, whatever its batch
ANSWER_TOKENS = 512
PROMPT_WORDS = 16
RAMP_S = 2.0  # from the first request to the first figure
FRONT = "serve"  # the first process; it has the gateway and the scheduler if no child has
MOST_LATE = 0.02  # share of its steps that the engine may miss

Counts = np.ndarray[tuple[int], np.dtype[np.float64]]

HARDWARE = """about = "An engine with steps of {step_s} s"
[cost]
base_s = {step_s}
prefill_token_s = 0.0
decode_seq_s = 0.0
context_token_s = 0.0
[memory]
kv_tokens = 4_194_304
host_tokens = 0
[engine]
max_running = 4_096
max_batch_tokens = 65_536
max_context_tokens = 2_048
"""


@contextmanager
def emulated_system(checkout: str, policy: str, gateways: int | None = None) -> Iterator[System]:
    """Runs `foretoken serve` with an engine of STEP_S per step. `policy` is a setting; `gateways`:
    None for what the checkout does."""
    with TemporaryDirectory(prefix="foretoken-front-") as folder:
        hardware = Path(folder, "steps.toml")
        hardware.write_text(HARDWARE.format(step_s=STEP_S))
        count = [] if gateways is None else ["--gateways", str(gateways)]
        arguments = ("--emulate", str(hardware), *count, *settings("log.path=", policy))
        with foretoken_system(*arguments, checkout=checkout) as system:
            yield system


async def measure_streams(system: System, streams: int, seconds: float) -> dict[str, float]:
    """Figures of so many streams, each with one answer after the other.

    Raises RuntimeError if a stream fails or an answer has not its length.
    """
    clients = _Clients(system.http, streams)
    connections = [await clients.open(i) for i in range(streams)]

    def counts() -> Counts:
        sums = (sum(c.tokens for c in connections), sum(c.events for c in connections))
        return np.array((*sums, clients.answers, time.process_time(), time.perf_counter()))

    await asyncio.sleep(RAMP_S)
    engine_s = await _busy_s(system)
    clients.latency_s = []
    before, cpu = counts(), read_cpu(system.pid, FRONT)
    await asyncio.sleep(seconds)
    cpu = spent(cpu, read_cpu(system.pid, FRONT))
    gateway_s = cpu.get(GATEWAY, cpu[FRONT])
    tokens, events, answers, client_s, lasted_s = (counts() - before).tolist()
    latency_s = clients.latency_s
    engine_s = await _busy_s(system) - engine_s
    for connection in connections:
        connection.stop()
    await asyncio.gather(*(connection.ended for connection in connections))
    latency_ms = np.quantile(latency_s, (0.5, 0.99)) * 1e3
    return {
        "tok_s": tokens / lasted_s,
        "requests_s": answers / lasted_s,
        "tokens_per_event": tokens / events,
        "gateway_cpu": gateway_s / lasted_s,
        "scheduler_cpu": cpu.get("scheduler", 0.0) / lasted_s,
        "us_per_token": cpu[FRONT_END] / tokens * 1e6,
        "us_per_event": cpu[FRONT_END] / events * 1e6,
        "added_p50_ms": float(latency_ms[0]),
        "added_p99_ms": float(latency_ms[1]),
        "worker_cpu": cpu["worker"] / lasted_s,
        "client_cpu": client_s / lasted_s,
        "engine_busy": engine_s / lasted_s,
    }


class _Clients:
    """The streams of one measurement: how many answers have ended, and their added latencies.

    The first answers are shorter, each by another share, so that later ones do not end together.
    """

    def __init__(self, url: str, streams: int):
        self.answers = 0
        self.latency_s: list[float] = []
        self._url, self._streams = HttpAddress.parse(url), streams
        self._rng = np.random.default_rng(0)

    async def open(self, i: int) -> StreamingConnection:
        length = 0

        def next_request() -> bytes:
            nonlocal length
            length = ANSWER_TOKENS if length else max(1, ANSWER_TOKENS * (i + 1) // self._streams)
            body = fixed_body(" ".join(self._rng.choice(WORDS, PROMPT_WORDS)), length)
            head = f"POST {PATH} HTTP/1.1\r\nHost: {self._url.authority}\r\n"
            return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

        def on_answer(arrivals: Arrivals) -> None:
            counted = arrivals.tokens[-1] if arrivals.tokens else 0
            if abs(counted - length) > 1:  # the first word may begin without a space
                raise RuntimeError(f"an answer of {length} tokens has {counted} words")
            self.answers += 1
            self.latency_s += added_latency_s(arrivals, STEP_S)

        return await StreamingConnection.open(self._url, next_request, on_answer)


async def _busy_s(system: System) -> float:
    metrics = await asyncio.to_thread(read_metrics, system.http)
    return metrics["worker_busy_seconds_total"]
