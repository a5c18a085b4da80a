"""Small workloads and hardware for the simulator's tests."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from services.costs import CostModel
from services.policies.preset import Preset, choose
from simulator.engine.settings import RunSettings, Timing
from simulator.hardware.hardware import Hardware
from simulator.workload.workload import Workload

# 1 s a step and 0.1 s a prefilled token, so that times can be worked out by hand.
BY_HAND = CostModel(1.0, 0.1, 0.0, 0.0)
INSTANT = Timing(hop_s=0.0, forecast_s=0.0, round_s=0.0, round_job_s=0.0, refresh_s=0.0)
SMALL = Hardware(
    "small",
    CostModel(0.01, 1e-4, 1e-4, 1e-6, offload_token_s=1e-5, upload_token_s=2e-5),
    kv_tokens=1_024,
    host_tokens=2_048,
    max_running=16,
    max_batch_tokens=128,
)
WITHOUT_PROMPTS = {"max", "history", "oracle"}


def workload(rows: Sequence[tuple[float, int, int]], clients: int = 0) -> Workload:
    """Requests as (arrival, input tokens, output tokens)."""
    arrival_s, inputs, outputs = zip(*rows, strict=True)
    return Workload(
        "test",
        np.array(arrival_s, float),
        np.array(inputs, np.int64),
        np.array(outputs, np.int64),
        clients=clients,
    )


def sharing_workload(seed: int, requests: int, rate: float) -> Workload:
    """Prompts of up to 120 tokens that begin with one of three texts of 60 characters or less."""
    made, rng = random_workload(seed, requests, rate), np.random.default_rng(seed)
    starts = ["a" * 60, "b" * 60, "a" * 40]
    prompts = [
        (starts[rng.integers(3)] + f"{row:064d}")[:tokens]
        for row, tokens in enumerate(made.input_tokens.tolist())
    ]
    return replace(made, prompts=prompts)


def random_workload(seed: int, requests: int, rate: float) -> Workload:
    rng = np.random.default_rng(seed)
    return Workload(
        "random",
        np.cumsum(rng.exponential(1 / rate, requests)),
        rng.integers(1, 120, requests),
        np.minimum(200, 1 + rng.geometric(1 / 40, requests)),
    )


def settings(
    preset: str | Preset,
    hardware: Hardware = SMALL,
    workers: int = 1,
    timing: Timing | None = None,
    max_tokens: int = 256,
    jumps: bool = True,
) -> RunSettings:
    """Settings with a predictor that needs no prompts: the preset's own, else history."""
    chosen = choose(preset) if isinstance(preset, str) else preset
    made = RunSettings(
        chosen,
        (hardware,) * workers,
        max_tokens=max_tokens,
        predictor="" if chosen.predictor in WITHOUT_PROMPTS else "history",
        jumps=jumps,
    )
    return made if timing is None else replace(made, timing=timing)
