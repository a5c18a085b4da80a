"""Plans that keep a fast engine full, although rounds take longer than many of its steps."""

import numpy as np
import pytest

from services.costs import CostModel
from services.policies.preset import choose
from simulator.engine.settings import RunSettings, Timing
from simulator.engine.simulation import RunResult, simulate
from simulator.hardware.hardware import Hardware
from simulator.workload.workload import Workload

# Steps of 5 to 8 ms with 30 rows; a plan comes every 100 ms and arrives 20 ms later.
FAST = Hardware("fast", CostModel(0.005, 2e-5, 5e-5, 2e-7), kv_tokens=4_096)
PROMPT = Timing(hop_s=0.0, round_s=0.0001, round_job_s=0.0)
SLOW = Timing(hop_s=0.02, round_s=0.01, round_job_s=0.0)


def short_answers(count: int) -> Workload:
    """More requests than the worker can serve, with answers of 15 to 60 tokens for the most part,
    and forecasts that are off by a factor of 1.6."""
    rng = np.random.default_rng(0)
    outputs = np.clip(rng.lognormal(np.log(30), 0.7, count), 4, 400).astype(np.int64)
    inputs = np.clip(rng.lognormal(np.log(60), 0.5, count), 8, 400).astype(np.int64)
    forecast = np.ceil(outputs * rng.lognormal(0, 0.5, count)).astype(np.int64)
    arrival_s = np.cumsum(rng.exponential(1 / 400, count))
    return Workload("short", arrival_s, inputs, outputs, forecast_tokens=forecast.tolist())


def run(timing: Timing, count: int) -> RunResult:
    settings = RunSettings(
        choose("foretoken"), (FAST,), max_tokens=512, predictor="given", timing=timing
    )
    return simulate(settings, short_answers(count))


def throughput(result: RunResult) -> float:
    return float(np.sum(result.records.tokens)) / result.end_s


@pytest.mark.slow
def test_slow_rounds_cost_little_throughput():
    """Planning for the memory of now would cost a fifth: what ends between two plans stays
    empty."""
    slow, prompt = run(SLOW, 600), run(PROMPT, 600)
    assert throughput(slow) >= 0.85 * throughput(prompt)


def test_rounds_are_rare_in_the_slow_case():
    """The premise of the test above: a plan for many steps."""
    result = run(SLOW, 200)
    assert result.usages[0].steps >= 10 * result.rounds
