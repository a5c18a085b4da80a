"""The cost of observability.

    python -m benchmarks.observed [--json FILE] [--quick]

Three systems with the demo model run on one machine and are measured in turn, in reverse order in
every other round. The first has no observers. The /metrics of the second are scraped every 5
seconds. The third is scraped and traces every request to a collector, a separate process that drops
what it receives. Each gets the same requests through gRPC. The benchmark prints tokens per second
and the loss relative to the first system, as the median of the rounds' ratios.

The collector runs on the measured machine, so its work counts as a cost of tracing. All three
systems count metrics in their processes.
"""

import asyncio
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from statistics import median

from benchmarks.harness.clients import GrpcClient, measure_throughput
from benchmarks.harness.report import Measurements, alternating, parser, show, write
from benchmarks.harness.system import foretoken_system, read_metrics, running, settings
from benchmarks.harness.throughput import make_prompts
from services.runtime.tasks import background

KV_TOKENS = 32_768
PROMPT_TOKENS = 32
SCRAPE_S = 5.0
MAX_LOSS = 0.02  # target: share of the throughput
UNOBSERVED = "unobserved"
# system: scraped, traced
SYSTEMS = {UNOBSERVED: (False, False), "scraped": (True, False), "scraped and traced": (True, True)}
COLLECTOR = (sys.executable, "-m", "benchmarks.harness.otlp_sink")


@contextmanager
def collector() -> Iterator[str]:
    """Runs a collector process; yields its address."""
    with running([*COLLECTOR], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


async def scrape(url: str) -> None:
    """Reads the metrics every SCRAPE_S until cancelled."""
    while True:
        await asyncio.to_thread(read_metrics, url)
        await asyncio.sleep(SCRAPE_S)


async def measure(options: Namespace) -> Measurements:
    """Returns tokens per second by system."""
    streams, output_tokens, rounds = (8, 32, 2) if options.quick else (64, 128, 11)
    measured = Measurements()
    async with AsyncExitStack() as stack:
        endpoint = stack.enter_context(collector())
        clients = {}
        for name, (is_scraped, is_traced) in SYSTEMS.items():
            choices = ["log.path="]
            choices += [f"tracing.endpoint=http://{endpoint}"] if is_traced else []
            system = foretoken_system("--kv-tokens", str(KV_TOKENS), *settings(*choices))
            served = stack.enter_context(system)
            clients[name] = GrpcClient(served.grpc)
            stack.push_async_callback(clients[name].close)
            warm_up = make_prompts(streams, PROMPT_TOKENS, seed=0)
            await measure_throughput(clients[name].generate, warm_up, 16)
            if is_scraped:
                await stack.enter_async_context(background(scrape(served.http)))
        for number, names in alternating(list(SYSTEMS), rounds):
            prompts = make_prompts(streams, PROMPT_TOKENS, seed=1 + number)
            for name in names:
                rate = await measure_throughput(clients[name].generate, prompts, output_tokens)
                measured.add((name,), rate)
    return measured


def loss(measured: Measurements, name: str) -> float:
    """Returns the lost share of the unobserved system's throughput in the same round."""
    pairs = zip(measured.values[(name,)], measured.values[(UNOBSERVED,)], strict=True)
    return median(1 - observed / unobserved for observed, unobserved in pairs)


def main() -> None:
    options = parser(__doc__).parse_args()
    measured = asyncio.run(measure(options))
    losses = {name: loss(measured, name) for name in SYSTEMS}
    show(
        "tokens/s: median (lowest–highest)",
        ["", "tokens/s", "lost"],
        [[name, measured.figure(name), f"{losses[name]:.1%}"] for name in SYSTEMS],
    )
    del losses[UNOBSERVED]
    for name, lost in losses.items():
        missed = ", missed" if lost > MAX_LOSS else ""
        print(f"{name}: {lost:.1%} lost (target {MAX_LOSS:.0%}{missed})")
    write(
        options.json,
        {"tok_s": measured.medians(), "lost": losses, "repeats": measured.repeats()},
    )


if __name__ == "__main__":
    main()
