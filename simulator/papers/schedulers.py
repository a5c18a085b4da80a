"""The schedulers of a paper as served presets, and their runs over lengths of a dataset."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints
from services.policies.preset import choose
from simulator.engine.given import GIVEN
from simulator.engine.settings import RunSettings, Timing
from simulator.engine.simulation import RunResult, simulate
from simulator.hardware.hardware import Hardware
from simulator.papers.datasets import Lengths
from simulator.papers.modelled import classify_lengths, disturb_lengths, rank_lengths
from simulator.papers.reproduction import Row
from simulator.report.summary import summarize
from simulator.workload.workload import Workload

UNBOUNDED = 2**30  # waiting requests: the papers refuse none
P90 = 0.9

# Predictors modelled by their quality: lengths come without the prompts that real ones read.
MODELLED: dict[str, Callable[..., Ints]] = {
    "ranker": rank_lengths,
    "perception": rank_lengths,
    "classifier": classify_lengths,
    "retrieval": disturb_lengths,
}
Quality = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A preset with `numbers` in place of its own, under its name in the paper. `parameter`
    describes the numbers. `predictor`, or the one of MODELLED that `modelled` names, replaces the
    preset's."""

    name: str
    preset: str
    parameter: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)
    modelled: str = ""
    predictor: str = ""

    @property
    def label(self) -> str:
        """The name with the parameter."""
        return f"{self.name} {self.parameter}".rstrip()

    @property
    def shown_predictor(self) -> str:
        """The modelled predictor as a row shows it; empty for the preset's own."""
        return f"modelled {self.modelled}" if self.modelled else ""


@dataclass(frozen=True, slots=True)
class Conditions:
    """What all schedulers of a comparison share. A modelled predictor answers after `forecast_s`
    with its quality of `qualities`."""

    hardware: Hardware
    max_tokens: int
    forecast_s: float
    qualities: Mapping[str, Quality]
    seed: int
    stop_after: int = 0


def serve(
    scheduler: Scheduler, conditions: Conditions, lengths: Lengths, arrival_s: Floats
) -> RunResult:
    """Runs the scheduler. Errors of a modelled predictor depend on the seed and the requests, so
    that schedulers with the same predictor read the same forecasts.

    With the preset's `guess_tokens`, each request generates its guess before the answer. The guess
    takes the place of `forecast_s`, and the records count tokens of answers alone.
    """
    preset = choose(scheduler.preset, scheduler.numbers)
    guess_tokens = int(preset.params.get("guess_tokens", 0))
    forecast_tokens: list[int] = []
    if scheduler.modelled:
        rng = np.random.default_rng([conditions.seed, 2])
        quality = conditions.qualities[scheduler.modelled]
        model = MODELLED[scheduler.modelled]
        answers = model(lengths.output_tokens, **quality, rng=rng)
        forecast_tokens = (answers + guess_tokens).tolist()
    workload = Workload(
        lengths.origin,
        arrival_s,
        lengths.input_tokens,
        lengths.output_tokens + guess_tokens,
        forecast_tokens=forecast_tokens,
    )
    waits = scheduler.modelled and not guess_tokens
    settings = RunSettings(
        preset,
        (conditions.hardware,),
        max_tokens=conditions.max_tokens + guess_tokens,
        max_queue=UNBOUNDED,
        predictor=GIVEN if scheduler.modelled else scheduler.predictor,
        timing=Timing(forecast_s=conditions.forecast_s if waits else 0.0),
        seed=conditions.seed,
        stop_after=conditions.stop_after,
    )
    result = simulate(settings, workload)
    result.records.tokens = np.maximum(result.records.tokens - guess_tokens, 0)
    return result


def measure_latency(result: RunResult) -> Row:
    """Returns the latency per output token of finished requests, and their `waiting`, the longer of
    TTFT and longest gap, in seconds; the preemptions and evictions of all requests."""
    summary, records = summarize(result), result.records
    return {
        "finished": summary.finished,
        "latency_mean_s": round(summary.token_latency_mean_s, 4),
        "latency_p90_s": round(float(np.quantile(records.normalized_s[records.finished], P90)), 4),
        "latency_p99_s": round(summary.token_latency_p99_s, 4),
        "waiting_mean_s": round(summary.waiting_mean_s, 3),
        "waiting_p99_s": round(summary.waiting_p99_s, 3),
        "output_tokens_per_s": round(summary.output_tokens_per_s, 1),
        "preemptions": summary.preemptions,
        "evictions": summary.evictions,
    }
