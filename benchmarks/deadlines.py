"""Time from a missed deadline to the end of the request at its client, under overload.

    python -m benchmarks.deadlines [--json FILE] [--quick] [--padded] [--dtype bfloat16]
        [--preset foretoken] [--factors 0.9,3,10] [--seconds S] [--rounds N]

Requests of the demo load arrive at multiples of the capacity, as in `benchmarks.overload`, each
with a timeout between 1 and 5 s in the header `x-request-timeout-s`. The clock of a request starts
when it is sent. Figures: `complete`, `ended` and `refused` are shares of all requests: whole
answers, requests that the server ended at their deadline (504 before the first token, finish reason
`deadline` after it), and 429s. `failed` are the others. `late` is the time from the deadline to the
end at the client: of requests that were ended (below 0 for a server that ends them
early), and of complete answers that came after their deadline. `client_max_s` is the largest delay
of a timer within the client in the same time: a late client makes the server look late.
"""

import asyncio
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus

import numpy as np
import uvloop

from benchmarks.harness.report import Measurements, parse_factors, parser, show, write
from benchmarks.overload.demo_load import DueRequest, poisson_load
from benchmarks.overload.measuring import measure_capacity
from benchmarks.overload.open_loop import PATH, REFUSED
from benchmarks.overload.systems import (
    DTYPES,
    SYSTEMS,
    ServedModel,
    padded_demo_model,
    serving,
    wait_until_idle,
)
from foretoken.bench.client import Server
from foretoken.bench.samples import Sample
from foretoken.client.client import TIMEOUT_KEY
from services.policies.preset import presets
from services.runtime.process_limits import raise_open_file_limit

TIMEOUTS_S = (1.0, 5.0)
PATIENCE_S = 30.0  # after the deadline; a request without an end by then has failed
BURST, WARM_UP = 600, 200  # requests
TICK_S = 0.005
DEADLINE = "deadline"  # finish reason


@dataclass(frozen=True)
class TimedRequest:
    """A request with its timeout, and its answer."""

    timeout_s: float
    sample: Sample

    @property
    def refused(self) -> bool:
        return str(self.sample.status) == REFUSED

    @property
    def ended_at_deadline(self) -> bool:
        sample = self.sample
        return sample.status == HTTPStatus.GATEWAY_TIMEOUT or sample.finish_reason == DEADLINE

    @property
    def complete(self) -> bool:
        return self.sample.complete and not self.ended_at_deadline

    @property
    def late_s(self) -> float:
        """From the deadline to the end; negative for an answer before it."""
        return self.sample.end_s - self.sample.sent_s - self.timeout_s


def figures_of(requests: Sequence[TimedRequest]) -> dict[str, float]:
    """Shares of all requests, and quantiles of the lateness after missed deadlines; NaN without a
    missed deadline."""
    late_s = [r.late_s for r in requests if r.ended_at_deadline or (r.complete and r.late_s > 0)]
    quantiles = np.quantile(late_s, (0.5, 0.99, 1.0)) if late_s else [np.nan] * 3
    number = len(requests)
    complete, ended, refused = (
        sum(getattr(r, name) for r in requests)
        for name in ("complete", "ended_at_deadline", "refused")
    )
    return {
        "complete": complete / number,
        "ended": ended / number,
        "refused": refused / number,
        "failed": (number - complete - ended - refused) / number,
        "late_p50_s": float(quantiles[0]),
        "late_p99_s": float(quantiles[1]),
        "late_max_s": float(quantiles[2]),
    }


async def send(
    url: str, load: Sequence[DueRequest], timeouts_s: Sequence[float]
) -> list[TimedRequest]:
    """Sends the requests when they are due, each with its timeout."""
    server = Server(url)
    began_s = time.perf_counter()
    requests = [
        TimedRequest(timeout_s, Sample(due.due_s))
        for due, timeout_s in zip(load, timeouts_s, strict=True)
    ]
    async with asyncio.TaskGroup() as tasks:
        for due, request in zip(load, requests, strict=True):
            await asyncio.sleep(began_s + due.due_s - time.perf_counter())
            limit_s = request.timeout_s + PATIENCE_S
            headers = [f"{TIMEOUT_KEY}: {request.timeout_s:.3f}"]
            stream = server.stream(PATH, due.body, request.sample, began_s, limit_s, headers)
            tasks.create_task(stream)
    await server.close()
    return requests


@asynccontextmanager
async def measuring_delays(delays_s: list[float]) -> AsyncIterator[None]:
    """Appends how late each timer of this event loop is."""

    async def tick() -> None:
        while True:
            due_s = time.perf_counter() + TICK_S
            await asyncio.sleep(TICK_S)
            delays_s.append(time.perf_counter() - due_s)

    ticking = asyncio.create_task(tick())
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)


async def measure(
    options: Namespace, model: ServedModel, rate: float, measured: Measurements
) -> None:
    rng = np.random.default_rng(5)
    for number in range(options.rounds):
        with serving(options.preset, model) as system:
            warm_up = poisson_load(model.pool.draw_bodies(WARM_UP, seed=3), 0.8 * rate, seed=3)
            await send(system.http, warm_up, [60.0] * len(warm_up))
            for factor in parse_factors(options.factors):
                await wait_until_idle(system.http)
                count = max(1, round(factor * rate * options.seconds))
                bodies = model.pool.draw_bodies(count, seed=10 + number)
                load = poisson_load(bodies, factor * rate, number)
                delays_s: list[float] = []
                async with measuring_delays(delays_s):
                    timeouts_s = rng.uniform(*TIMEOUTS_S, len(load)).tolist()
                    requests = await send(system.http, load, timeouts_s)
                for name, value in figures_of(requests).items():
                    measured.add((f"{factor:g}", name), value)
                measured.add((f"{factor:g}", "client_max_s"), max(delays_s, default=0.0))


def main(options: Namespace) -> None:
    raise_open_file_limit()
    with padded_demo_model() if options.padded else nullcontext("") as folder:
        model = ServedModel(folder, options.dtype)
        burst = BURST // 4 if options.quick else BURST
        capacity = uvloop.run(measure_capacity(model, burst, PATIENCE_S))
        measured = Measurements()
        uvloop.run(measure(options, model, capacity["requests_s"], measured))
    names = list(dict.fromkeys(name for _, name in measured.values))
    rows = [
        (factor, *(measured.figure(factor, name) for name in names))
        for factor in dict.fromkeys(factor for factor, _ in measured.values)
    ]
    title = f"Deadlines at multiples of {capacity['requests_s']:.1f} requests/s"
    show(title, ("load", *names), rows, width=190)
    write(options.json, {"capacity": capacity, **measured.medians(), "repeats": measured.repeats()})


def _options() -> Namespace:
    options = parser(__doc__)
    add = options.add_argument
    add("--preset", choices=sorted({*SYSTEMS, *presets()}), default="foretoken", metavar="NAME")
    add("--factors", default="0.9,3,10", help="of the capacity")
    add("--seconds", type=float, default=0.0, help="of arrivals at each factor; default: 12")
    add("--rounds", type=int, default=0, help="default: 2, 1 with --quick")
    add("--padded", action="store_true", help="pad the demo model with zeros")
    add("--dtype", choices=DTYPES, default=DTYPES[0])
    parsed = options.parse_args()
    parse_factors(parsed.factors)  # a mistake ends the run before anything starts
    parsed.seconds = parsed.seconds or (3.0 if parsed.quick else 12.0)
    parsed.rounds = parsed.rounds or (1 if parsed.quick else 2)
    return parsed


if __name__ == "__main__":
    main(_options())
