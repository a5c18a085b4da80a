"""`python -m benchmarks.observed`: the cost of observability.

One run on one machine with the demo model: three systems are loaded at once and measured in turns,
every other round in reverse order: one without observers; one whose /metrics are scraped every 5
seconds; and one that is scraped and traces every request to a collector, a process of its own that
drops what it receives. Each gets the same requests through gRPC. Prints tokens per second, and the
loss relative to the first, as the median of the rounds' ratios.

A collector on the measured machine counts as cost of tracing. Metrics are always counted in the
processes, in all three systems.
"""

import asyncio
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from statistics import median

from benchmarks.harness.clients import GrpcClient, tokens_per_s
from benchmarks.harness.report import Figure, Options, figure, options, show, write
from benchmarks.harness.system import counted, running, system

KV_TOKENS = 32_768
PROMPT_TOKENS = 32
SCRAPE_S = 5.0
REACH = 0.02  # of throughput lost
UNSEEN = "unobserved"
WAYS = {UNSEEN: (False, False), "scraped": (True, False), "scraped and traced": (True, True)}
SINK = (sys.executable, "-m", "benchmarks.harness.otlp_sink")


def prompts(count: int, number: int) -> list[list[int]]:
    """Of round `number`; no two are equal, so that prefix caches do not help."""
    return [
        [40 + (7 * i + 3 * j + 11 * number) % 200 for j in range(PROMPT_TOKENS)]
        for i in range(count)
    ]


@contextmanager
def sink() -> Iterator[str]:
    """A collector's address, in a process of its own."""
    with running([*SINK], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


@asynccontextmanager
async def scraped(url: str) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            await asyncio.to_thread(counted, url)
            await asyncio.sleep(SCRAPE_S)

    looking = asyncio.ensure_future(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


async def measure(settings: Options) -> dict[str, list[float]]:
    """Tokens a second of each way, by round."""
    streams, output_tokens, rounds = (8, 32, 2) if settings.quick else (64, 128, 11)
    taken: dict[str, list[float]] = defaultdict(list)
    async with AsyncExitStack() as stack:
        collector = stack.enter_context(sink())
        clients = {}
        for way, (look, trace) in WAYS.items():
            options = ["--set", "log.path="]
            options += ["--set", f"tracing.endpoint=http://{collector}"] if trace else []
            url, address = stack.enter_context(system("--kv-tokens", str(KV_TOKENS), *options))
            clients[way] = GrpcClient(address)
            stack.push_async_callback(clients[way].close)
            await tokens_per_s(clients[way].ask, prompts(streams, 0), 16)
            if look:
                await stack.enter_async_context(scraped(url))
        for number in range(rounds):
            for way in list(WAYS)[:: -1 if number % 2 else 1]:
                some = prompts(streams, 1 + number)
                taken[way].append(await tokens_per_s(clients[way].ask, some, output_tokens))
    return taken


def lost(taken: dict[str, list[float]], way: str) -> float:
    """Share of the throughput of the unobserved system, in the same round."""
    return median(1 - own / other for own, other in zip(taken[way], taken[UNSEEN], strict=True))


def main() -> None:
    settings = options(__doc__ or "")
    taken = asyncio.run(measure(settings))
    figures: dict[str, Figure] = {way: figure(values) for way, values in taken.items()}
    show(
        "tokens/s: median (lowest–highest)",
        ["", "tokens/s", "lost"],
        [[way, figures[way], f"{lost(taken, way):.1%}"] for way in WAYS],
    )
    for way in list(WAYS)[1:]:
        missed = ", missed" if lost(taken, way) > REACH else ""
        print(f"{way}: {lost(taken, way):.1%} lost (reach {REACH:.0%}{missed})")
    write(
        settings.json,
        {
            "tok_s": {way: figures[way].median for way in WAYS},
            "lost": {way: lost(taken, way) for way in list(WAYS)[1:]},
            "repeats": taken,
        },
    )


if __name__ == "__main__":
    main()
