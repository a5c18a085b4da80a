"""Busy shares of the overload benchmark: worked readings, and those of a running server."""

import asyncio
import os
from math import isnan, nan

import pytest

from benchmarks.harness.system import System, cpu_seconds, sum_metrics
from benchmarks.overload.busy import (
    Reading,
    busy_figures,
    describe_invalid,
    describe_room,
    watching,
)
from tests.live import serving


def test_shares_match_worked_readings():
    """10 s, of which requests wait in the first 4 (three readings) and the engine works for 3 of
    these; KV is 80, 90 and 90 % full then."""
    readings = [
        Reading(0.0, 100.0, 7.0, 5, 0.8),
        Reading(2.0, 101.5, 7.5, 9, 0.9),
        Reading(4.0, 103.0, 8.0, 1, 0.9),
        Reading(6.0, 104.0, 8.0, 0, 0.1),
        Reading(10.0, 106.0, 9.0, 3, 0.1),
    ]
    assert busy_figures(readings) == pytest.approx(
        {
            "engine_busy": 0.6,
            "front_cpu": 0.2,
            "engine_idle": 0.25,
            "kv_used": 0.875,
            "engine_full": 0.56,
        }
    )


def test_shares_of_several_workers_are_means():
    """Readings have the sums of the workers' counters and shares."""
    readings = [Reading(0.0, 10.0, 1.0, 5, 1.6), Reading(2.0, 13.0, 2.0, 5, 1.4)]
    figures = busy_figures(readings, workers=2)
    assert (figures["engine_busy"], figures["engine_idle"]) == (0.75, 0.25)
    assert (figures["kv_used"], figures["engine_full"]) == pytest.approx((0.75, 0.75))


def test_load_without_waiting_requests_has_no_idle_share():
    figures = busy_figures([Reading(0.0, 1.0, 1.0, 0, 0.5), Reading(1.0, 1.5, 1.0, 4, 0.5)])
    assert isnan(figures["engine_idle"]) and isnan(figures["kv_used"])
    assert describe_invalid("fcfs", "0.5", [figures["engine_idle"]]) == ""


def test_peer_without_a_busy_counter_has_no_engine_shares():
    figures = busy_figures([Reading(0.0, nan, 1.0, 2, 0.5), Reading(1.0, nan, 1.5, 2, 0.5)])
    assert isnan(figures["engine_busy"]) and isnan(figures["engine_idle"])
    assert (figures["front_cpu"], figures["kv_used"]) == (0.5, 0.5)


def test_overload_with_room_in_the_engine_is_reported():
    """Two workers with 50 slots each: 80 of 100, then 30 % of the KV of both."""
    readings = [Reading(0.0, 1.0, 1.0, 0, 0.1, 80), Reading(1.0, 2.0, 1.0, 0, 0.6, 10)]
    full = busy_figures(readings, workers=2, max_running=50)["engine_full"]
    assert full == pytest.approx(0.55)
    assert describe_room("fcfs", "2", [full, 0.5]) == describe_room("fcfs", "0.9", [0.1]) == ""
    assert describe_room("fcfs", "2", [full, 0.12]) == (
        "fcfs at 2 ×: KV and slots of the engine were 12% full on average; unless the preset "
        "reserves the rest, the gateway or the client was the limit"
    )


def test_row_of_an_idle_engine_is_not_valid():
    assert describe_invalid("fcfs", "1.6", [0.1, 0.05]) == ""
    assert describe_invalid("fcfs", "1.6", [nan, 0.25, 0.02]) == (
        "fcfs at 1.6 × is not valid: the engine was idle for 25% of the time in which requests "
        "waited, so this row does not measure the policy"
    )


@pytest.mark.slow
async def test_running_server_says_how_busy_it_is():
    with serving("--set", "log.path=") as live:
        async with watching(System(live.http, live.grpc, os.getpid())) as readings:
            await asyncio.sleep(0)
        assert len(readings) == 2
        figures = busy_figures(readings)
    assert 0 <= figures["engine_busy"] <= 1 and figures["front_cpu"] >= 0
    assert cpu_seconds(os.getpid()) > 0


def test_metrics_by_two_names_count_once():
    page = (
        'foretoken_num_requests_running{worker="0"} 2.0\n'
        'foretoken_num_requests_running{worker="1"} 3.0\n'
        'vllm:num_requests_running{worker="0"} 2.0\n'
        'vllm:num_requests_running{worker="1"} 3.0\n'
        "foretoken_worker_busy_seconds_total 1.5\nvllm:only_there 7\n"
    )
    totals = {"num_requests_running": 5.0, "worker_busy_seconds_total": 1.5, "only_there": 7.0}
    assert sum_metrics(page) == totals
