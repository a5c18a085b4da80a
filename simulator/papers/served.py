"""One run of a served preset as a row of measures."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

import numpy as np

from services.policies.preset import choose
from simulator.engine.settings import RunSettings, Timing
from simulator.engine.simulation import RunResult, simulate
from simulator.hardware.hardware_file import load_hardware
from simulator.papers.reproduction import Row
from simulator.papers.schedulers import UNBOUNDED
from simulator.workload.workload import Workload

P95, P99 = 0.95, 0.99


@dataclass(frozen=True, slots=True)
class ServedRun:
    """A preset with `numbers` in place of its own, on `workers` of a hardware profile. `predictor`
    and `kv_tokens` replace the preset's and the profile's, if given. A request is scheduled once it
    has its forecast, as in the papers."""

    preset: str
    hardware: str
    workers: int
    numbers: Mapping[str, float] = field(default_factory=dict)
    predictor: str = ""
    kv_tokens: int = 0
    forecast_s: float = 0.0

    def measure(self, workload: Workload, max_tokens: int, seed: int) -> Row:
        """Simulates the workload until all requests have ended, and returns its measures."""
        hardware = load_hardware(self.hardware)
        if self.kv_tokens:
            hardware = replace(hardware, kv_tokens=self.kv_tokens)
        settings = RunSettings(
            choose(self.preset, self.numbers),
            (hardware,) * self.workers,
            max_tokens=max_tokens,
            max_queue=UNBOUNDED,
            predictor=self.predictor,
            timing=Timing(forecast_s=self.forecast_s, patience_s=inf),
            seed=seed,
        )
        return measure(simulate(settings, workload))


def measure(result: RunResult) -> Row:
    """Returns the papers' measures of a run.

    Rates are over the time from the first arrival to the last token. A response time ends with the
    last token; a static batch sends all tokens when it ends. `batch_size` is the mean size of
    static batches, or the mean number of decode rows. Padding and invalid tokens are means
    per request: padding prefilled in all batches of the request, and tokens drawn after its end.
    `completion_std_s` is the standard deviation of the times at which the workers complete.
    """
    records, usages = result.records, result.usages
    requests, done = len(result.workload), records.finished
    response_s = records.e2e_s[done]
    span_s = float(records.last_s[done].max() - records.arrival_s.min())
    batches = sum(usage.batches for usage in usages)
    busy_s = sum(usage.busy_s for usage in usages)
    rows = sum(usage.batch_members for usage in usages) / batches if batches else None
    valid, invalid = int(records.tokens.sum()), sum(usage.invalid_tokens for usage in usages)
    return {
        "requests": requests,
        "finished": int(done.sum()),
        "requests_per_s": float(done.sum()) / span_s,
        "valid_tokens_per_s": valid / span_s,
        "tokens_per_s": (valid + invalid) / span_s,
        "response_mean_s": float(response_s.mean()),
        "response_p95_s": float(np.quantile(response_s, P95)),
        "response_p99_s": float(np.quantile(response_s, P99)),
        "batch_size": rows or sum(usage.row_s for usage in usages) / busy_s,
        "padding_tokens": sum(usage.padding_tokens for usage in usages) / requests,
        "invalid_tokens": invalid / requests,
        "completion_std_s": float(np.std([usage.end_s for usage in usages])),
        "busy_share": busy_s / span_s / len(usages),
        "evictions": int(records.evictions.sum()),
    }
