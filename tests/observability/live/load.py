"""A load that makes a live stack count what it can: SLAs kept and missed, refusals, clients that
leave, memory that runs short, and forecasts told."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from itertools import count

from foretoken import AsyncClient
from foretoken.client.errors import ForetokenError
from models.tasks import examples
from tests.live import Live

KV_TOKENS = 384  # two requests or three
SLA_CLASSES = {
    "interactive": {"ttft_s": 0.02, "tpot_s": 0.002, "mtpot_s": 0.02},  # hardly ever kept
    "standard": {"ttft_s": 60.0, "tpot_s": 10.0, "mtpot_s": 60.0},  # always
    "batch": {},
}
ARGUMENTS = (
    "--workers=2",  # what rests at one is begun at the other
    f"--kv-tokens={KV_TOKENS}",
    "--dtype=float32",  # the same KV bytes on every machine
    "--speculative-tokens=4",  # some tasks repeat words
    "--host-gib=0.001",  # 400 tokens of KV: more is dropped
    f"--set=gateway.sla_classes={json.dumps(SLA_CLASSES)}",
    "--set=gateway.max_sessions=40",
    "--set=scheduler.max_queue=20",  # fewer than the sessions: both refuse
    "--set=worker.report_every_steps=4",
    # Reads prompts, and is fitted within seconds.
    "--set=preset.predictor=retrieval",
    "--set=predictor.cpu_share=1",
    "--set=predictor.nice=0",
    "--set=predictor.refit_interval_s=4",
    "--set=predictor.refit_new_min=20",
    "--set=log.path=",
    *(f"--set={section}.drain_s=2" for section in ("gateway", "scheduler", "worker")),
)
SYSTEM = (  # found by its prefix
    "You are a careful assistant. Read the task twice, answer it with nothing but the result, and "
    "keep the spelling of every word that you are given."
)
AT_ONCE = 24
BURST = 120  # more than there are places
ANSWERED_S = 60.0
IMPATIENT_S = 0.02  # less than a queue takes: refused at the door
ROUNDS = 3
CALM_S = 30.0
CALM_REQUESTS, CALM_PAUSE_S = 5, 0.2


async def load(live: Live, seconds: float, has_all: Callable[[], bool]) -> None:
    """Many requests of every kind with a burst among them; then one after another with pauses, so
    that there is time to read and to learn; and anew, up to ROUNDS, until `has_all()`."""
    numbers = count()
    async with AsyncClient(live.grpc) as client:
        for _ in range(ROUNDS):
            await _busy(client, live, seconds, numbers)
            if await _calm(client, has_all, numbers):
                break


async def _calm(client: AsyncClient, has_all: Callable[[], bool], numbers: Iterator[int]) -> bool:
    """Whether `has_all()` came true within CALM_S."""
    until = time.monotonic() + CALM_S
    while not (there := await asyncio.to_thread(has_all)) and time.monotonic() < until:
        for _ in range(CALM_REQUESTS):
            await _ask(client, next(numbers))
            await asyncio.sleep(CALM_PAUSE_S)
    return there


async def _busy(client: AsyncClient, live: Live, seconds: float, numbers: Iterator[int]) -> None:
    until = time.monotonic() + seconds

    async def on_and_on() -> None:
        while time.monotonic() < until:
            await _ask(client, next(numbers))

    async def burst() -> None:
        await asyncio.sleep(seconds / 2)
        await asyncio.gather(*(_ask(client, next(numbers)) for _ in range(BURST)))

    async def foreseen() -> None:
        while time.monotonic() < until:
            await asyncio.to_thread(ask_with_forecast, live, _prompt(next(numbers)))

    await asyncio.gather(burst(), foreseen(), *(on_and_on() for _ in range(AT_ONCE)))


async def _ask(client: AsyncClient, number: int) -> None:
    """Of each SLA class in turn; one of 11 is left by its client, one of 13 can't wait."""
    stream = client.generate(
        messages=[
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": _prompt(number)},
        ],
        sla=tuple(SLA_CLASSES)[number % len(SLA_CLASSES)],
        max_tokens=120,
        ignore_eos=number % 2 == 0,
        temperature=1.0,
        timeout_s=IMPATIENT_S if number % 13 == 7 else ANSWERED_S,
    )
    with suppress(ForetokenError):  # refused, as some are meant to be
        reported = 0
        async for chunk in stream:
            reported += len(chunk.token_ids)
            if number % 11 == 5 and reported > 10:
                stream.cancel()


@cache
def _prompts() -> list[str]:
    return [example.user for example in examples(3, 400, held_out=True)]


def _prompt(number: int) -> str:
    return _prompts()[number % len(_prompts())]


def ask_with_forecast(live: Live, prompt: str) -> None:
    """A stream over HTTP that asks for its forecast, read to its end."""
    body = {
        "model": "demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 60,
        "stream": True,
        "stream_options": {"include_forecast": True},
    }
    request = urllib.request.Request(
        f"{live.http}/v1/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json", "x-foretoken-sla": "standard"},
    )
    with suppress(OSError), urllib.request.urlopen(request, timeout=ANSWERED_S) as response:
        response.read()
