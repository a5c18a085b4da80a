"""The benchmark of deadlines: figures, and the timeouts that the server receives."""

import asyncio
import time
from math import isnan

import pytest

from benchmarks.deadlines import TimedRequest, figures_of, measuring_delays, send
from benchmarks.overload.demo_load import DueRequest
from foretoken.bench.samples import TIMED_OUT, Sample
from tests.gateway.gateway_fakes import run_harness, tokens_of

BODY = b'{"model": "demo", "messages": [{"role": "user", "content": "1,"}], "stream": true}'


def timed(timeout_s: float, end_s: float, **fields: object) -> TimedRequest:
    sample = Sample(0.0, sent_s=0.5, end_s=end_s)
    for name, value in fields.items():
        setattr(sample, name, value)
    return TimedRequest(timeout_s, sample)


def test_lateness_is_that_of_requests_whose_deadline_has_passed() -> None:
    figures = figures_of([
        timed(2.0, 1.0, status=200, finish_reason="stop"),
        timed(2.0, 2.75, status=200, finish_reason="stop"),  # complete, a quarter second late
        timed(1.0, 1.75, status=200, finish_reason="deadline"),
        timed(1.0, 2.0, status=504, problem="HTTP 504"),
        timed(1.0, 0.5, status=429, problem="HTTP 429"),
        timed(1.0, 31.5, status=200, problem=TIMED_OUT),
    ])  # fmt: skip
    assert figures == {
        "complete": pytest.approx(2 / 6),
        "ended": pytest.approx(2 / 6),
        "refused": pytest.approx(1 / 6),
        "failed": pytest.approx(1 / 6),
        "late_p50_s": 0.25,
        "late_p99_s": pytest.approx(0.495),
        "late_max_s": 0.5,
    }


def test_load_without_a_passed_deadline_has_no_lateness() -> None:
    figures = figures_of([timed(2.0, 1.0, status=200, finish_reason="stop")])
    assert figures["complete"] == 1.0 and isnan(figures["late_max_s"])


async def test_server_ends_requests_at_the_timeouts_that_are_sent() -> None:
    load = [DueRequest(0.0, BODY), DueRequest(0.01, BODY)]
    async with run_harness(lambda _: tokens_of("1" * 400)) as harness:  # 1 ms for each token
        short, long = await send(harness.http_url, load, [0.15, 20.0])
    assert short.ended_at_deadline and not short.complete and short.late_s > -0.05
    assert long.complete and not long.ended_at_deadline and long.late_s < 0


async def test_delay_of_the_client_includes_the_time_that_its_loop_was_blocked() -> None:
    delays_s: list[float] = []
    async with measuring_delays(delays_s):
        await asyncio.sleep(0)
        time.sleep(0.05)  # noqa: ASYNC251 - blocks the loop on purpose
        await asyncio.sleep(0.02)
    assert max(delays_s) > 0.03
