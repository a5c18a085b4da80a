"""How busy the parts of a system are during a load, and whether its engine was the limit.

A load compares schedulers only if the engine works whenever requests wait. Otherwise the gateway,
the client or the transport is the limit, and every order looks alike.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from math import isnan, nan
from statistics import fmean

from benchmarks.harness.cpu import FRONT_END, read_cpu
from benchmarks.harness.system import System, read_metrics
from benchmarks.overload.figures import Figures
from benchmarks.overload.systems import MAX_RUNNING
from services.runtime.tasks import background

INTERVAL_S = 0.5  # a reading takes the system some milliseconds
MOST_IDLE = 0.1  # share of the time in which requests wait
LEAST_FULL = 0.5  # of an overloaded engine


@dataclass(frozen=True)
class Reading:
    """The state of a system at one time. `engine_s` and `front_s` are totals; NaN: unknown.
    `engine_s`, `kv_share` and `running` are sums over the workers."""

    at_s: float
    engine_s: float
    front_s: float
    waiting: float
    kv_share: float
    running: float = 0.0


@asynccontextmanager
async def watching(system: System) -> AsyncIterator[list[Reading]]:
    """Yields the list of readings, which grows every INTERVAL_S until the end of the block."""
    readings = [await _read(system)]
    async with background(_read_forever(system, readings)):
        yield readings
    readings.append(await _read(system))


async def _read_forever(system: System, readings: list[Reading]) -> None:
    while True:
        await asyncio.sleep(INTERVAL_S)
        readings.append(await _read(system))


async def _read(system: System) -> Reading:
    metrics = await asyncio.to_thread(read_metrics, system.http)
    return Reading(
        time.perf_counter(),
        metrics.get("worker_busy_seconds_total", nan),
        read_cpu(system.pid, "serve")[FRONT_END],
        metrics["num_requests_waiting"],
        metrics["kv_cache_usage_perc"],
        metrics["num_requests_running"],
    )


def busy_figures(
    readings: Sequence[Reading], workers: int = 1, max_running: int = MAX_RUNNING
) -> Figures:
    """Shares of the time. `engine_busy`, the mean over the workers, and `front_cpu`, the CPU
    time of gateways and scheduler or of vLLM's API server, are of the whole time.
    `engine_idle`, the share without a step, and `kv_used`, the mean share of the KV in use, are of
    the time in which requests waited. NaN where the system has no such metric or no request
    waited. `engine_full` is the mean of the fuller of KV and slots for running requests."""
    first, last = readings[0], readings[-1]
    lasted_s = last.at_s - first.at_s
    waited_s = idle_s = used_s = 0.0
    for before, after in pairwise(readings):
        if min(before.waiting, after.waiting) > 0:
            part_s = after.at_s - before.at_s
            waited_s += part_s
            idle_s += part_s - (after.engine_s - before.engine_s) / workers
            used_s += part_s * (before.kv_share + after.kv_share) / 2 / workers
    return {
        "engine_busy": (last.engine_s - first.engine_s) / workers / lasted_s,
        "front_cpu": (last.front_s - first.front_s) / lasted_s,
        "engine_idle": idle_s / waited_s if waited_s else nan,
        "kv_used": used_s / waited_s if waited_s else nan,
        "engine_full": fmean(max(r.kv_share, r.running / max_running) for r in readings) / workers,
    }


def describe_invalid(name: str, factor: str, idle: Sequence[float]) -> str:
    """A sentence if the engine was idle for too long while requests waited, in any round; else
    empty. `idle` has a share for each round, NaN where no request waited."""
    longest = max((share for share in idle if not isnan(share)), default=0.0)
    if longest <= MOST_IDLE:
        return ""
    return (
        f"{name} at {factor} × is not valid: the engine was idle for {longest:.0%} of the time in "
        "which requests waited, so this row does not measure the policy"
    )


def describe_room(name: str, factor: str, full: Sequence[float]) -> str:
    """A sentence if the engine had room for most of an overload, in any round; else empty. A step
    with few rows keeps an engine busy that could serve many more."""
    least = min(full)
    if float(factor) <= 1 or least >= LEAST_FULL:
        return ""
    return (
        f"{name} at {factor} ×: KV and slots of the engine were {least:.0%} full on average; "
        "unless the preset reserves the rest, the gateway or the client was the limit"
    )
