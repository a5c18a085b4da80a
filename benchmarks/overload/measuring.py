"""The capacity of a served model, and the figures of one load on a running system."""

import asyncio
import time
from collections import Counter

import numpy as np

from benchmarks.harness.system import System, read_metrics
from benchmarks.overload.busy import busy_figures, watching
from benchmarks.overload.demo_load import burst_load, poisson_load
from benchmarks.overload.figures import (
    RAMP_SHARE,
    Figures,
    count_errors,
    figures_of,
    tokens_per_s,
)
from benchmarks.overload.open_loop import send_load
from benchmarks.overload.systems import ServedModel, serving


async def measure_capacity(
    model: ServedModel, burst: int, timeout_s: float, name: str = "fcfs"
) -> Figures:
    """Returns the requests per second that a system serves of `burst` requests sent at once, while
    its queue is never empty, and what they are. Answers may take four times `timeout_s`. Raises
    RuntimeError if a request fails."""
    with serving(name, model) as system:
        warm_up = burst_load(model.pool.draw_bodies(burst // 4, seed=1))
        await send_load(system.http, warm_up, timeout_s)
        load = burst_load(model.pool.draw_bodies(burst, seed=2))
        async with watching(system) as readings:
            answers = await send_load(system.http, load, 4 * timeout_s)
    if errors := [answer for answer in answers if answer.problem]:
        raise RuntimeError(f"requests failed during the capacity run: {dict(count_errors(errors))}")
    end_s = max(a.last_s for a in answers)
    tok_s = tokens_per_s(answers, RAMP_SHARE * end_s, (1 - RAMP_SHARE) * end_s)
    mean_tokens = float(np.mean([a.tokens for a in answers]))
    busy = busy_figures(readings, model.workers, model.max_running)
    return {
        "tok_s": tok_s,
        "mean_tokens": mean_tokens,
        "requests_s": tok_s / mean_tokens,
        "engine_busy": busy["engine_busy"],
        "engine_full": busy["engine_full"],
    }


async def measure_load(
    system: System,
    model: ServedModel,
    bodies: list[bytes],
    rate: float,
    timeout_s: float,
    seed: int,
) -> tuple[Figures, Counter[str]]:
    """Sends these requests to an idle server at `rate` per second; returns figures and errors."""
    load = poisson_load(bodies, rate, seed)
    resubmitted = await _count_resubmissions(system.http)
    async with watching(system) as readings:
        began_s, cpu_s = time.perf_counter(), time.process_time()
        answers = await send_load(system.http, load, timeout_s)
        client_cpu = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    figures = figures_of(answers, load[-1].due_s) | {
        "resubmitted": await _count_resubmissions(system.http) - resubmitted,
        "client_cpu": client_cpu,
    }
    figures |= busy_figures(readings, model.workers, model.max_running)
    return figures, count_errors(answers)


async def _count_resubmissions(url: str) -> float:
    return (await asyncio.to_thread(read_metrics, url)).get("resubmissions_total", 0.0)
