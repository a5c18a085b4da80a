"""Kill processes of a live system under a load with known answers."""

import asyncio
import os
import re
import signal
import time
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from foretoken import AsyncClient
from foretoken.client.answers import SamplingOptions
from tests.live import Live, serving
from tests.system.adapters import write_demo_adapter
from tests.system.children import children, is_alive

MODULES = {
    "worker": "services.worker",
    "predictor": "services.predictor",
    "scheduler": "services.scheduler",
    "batcher": "services.batcher",
    "estimator": "services.estimator",
    "gateway": "gateway",
    "scheduling": "foretoken.running.scheduling",
}
PROMPTS = [f"Count from {first} to {first + 90}.\n" for first in range(1, 9)]
GREEDY: SamplingOptions = {"temperature": 0.0, "ignore_eos": True}
ADAPTERS = ("", "", "murmur", "mutter")  # of requests; the device has a slot for one
IN_WORDS: SamplingOptions = {"temperature": 2.0, "grammar": "start: /([a-z]{2,8}, ){1000}/"}
BEGUN_WORDS = "([a-z]{2,8}, )*[a-z]*,? ?"  # no answer of TOKENS completes the grammar
TOKENS = 220  # long enough that a kill comes while they run
BACK_S = 60.0


@contextmanager
def two_workers(folder: Path, *arguments: str) -> Iterator[tuple[Live, Path]]:
    """A live system of two workers with adapters, and the file that holds its stderr. In float32,
    answers do not depend on the batch in which a token is computed."""
    output = folder / "stderr"
    adapters = (
        *(f"--lora-modules={name}={write_demo_adapter(folder / name)}" for name in ADAPTERS[2:]),
        "--set=worker.adapter_slots=1",
    )
    chosen = ("--dtype=float32", "--workers=2", "--kv-tokens=8192", *adapters, *arguments)
    with serving(*chosen, stderr=output) as live:
        yield live, output


async def answer(
    client: AsyncClient,
    prompt: str,
    tokens: int,
    options: SamplingOptions = GREEDY,
    adapter: str = "",
) -> list[int]:
    limited: SamplingOptions = {**options, "max_tokens": tokens}
    [choice] = (await client.generate(prompt, model=adapter, **limited).complete()).choices
    assert "grammar" not in options or re.fullmatch(BEGUN_WORDS, choice.text), choice.text
    return list(choice.token_ids)


async def answers(client: AsyncClient, tokens: int = TOKENS) -> list[list[int]]:
    """The answers to all prompts: every second one is drawn within a grammar, and every second pair
    has adapters."""
    return await asyncio.gather(
        *(
            answer(
                client,
                prompt,
                tokens,
                {**IN_WORDS, "seed": n} if n % 2 else GREEDY,
                ADAPTERS[n % 4],
            )
            for n, prompt in enumerate(PROMPTS)
        )
    )


async def check_answers_while(
    live: Live, expected: list[list[int]], happens: Callable[[], Awaitable[None]]
) -> int:
    """Send rounds of requests until `happens` returns, and one round more. Returns the number of
    answers. Raises AssertionError for the first answer that differs from the expected one."""
    over = asyncio.Event()

    async def load() -> int:
        rounds = 0
        async with AsyncClient(live.grpc) as client:
            last = False
            while not last:
                last = over.is_set()
                assert await answers(client) == expected
                rounds += 1
        return rounds * len(PROMPTS)

    async def happening() -> None:
        try:
            await asyncio.sleep(0.2)  # all requests of the first round have arrived
            await happens()
        finally:
            over.set()

    async with asyncio.TaskGroup() as tasks:
        loading = tasks.create_task(load())
        tasks.create_task(happening())
    return loading.result()


def series(live: Live, name: str, labels: str = "") -> list[float]:
    """The metric's series with these labels, in all processes of the system."""
    with urllib.request.urlopen(f"{live.http}/metrics", timeout=10) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    return [float(line.split()[-1]) for line in found if labels in line]


def metric(live: Live, name: str, labels: str = "") -> float:
    """The sum of the metric's series with these labels, in all processes of the system."""
    return sum(series(live, name, labels))


def pids(live: Live, section: str) -> list[int]:
    return sorted(children(live.process.pid, MODULES[section]))


async def kill_process(live: Live, section: str, number: int = signal.SIGKILL) -> None:
    """Send a signal to one process of the section and wait until another has replaced it."""
    before = pids(live, section)
    os.kill(before[0], number)
    until = time.monotonic() + BACK_S
    while is_alive(before[0]) or len(pids(live, section)) < len(before):
        assert time.monotonic() < until, f"no {section} has replaced process {before[0]}"
        await asyncio.sleep(0.05)


async def wait_for_output(output: Path, words: str, times: int = 1) -> None:
    """Wait until the output contains `words` at least `times` times."""
    until = time.monotonic() + BACK_S
    while (text := await asyncio.to_thread(output.read_text)).count(words) < times:
        assert time.monotonic() < until, f"the output lacks {words!r}: {text}"
        await asyncio.sleep(0.05)
