"""Magnus' evaluation: six schedulers at several rates, and Magnus with other predictors."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from simulator.engine.given import GIVEN
from simulator.papers.gains import compare_gains, read_gains
from simulator.papers.modelled import offset_lengths
from simulator.papers.reproduction import Case, Column, Reproduction, Row
from simulator.papers.served import ServedRun
from simulator.workload.builtin import build_workload

REQUESTS = 1_500
RATES = (4.0, 8.0, 16.0, 32.0)  # the paper's are in figures without numbers
HARDWARE, WORKERS = "v100-32g-chatglm-6b", 7
MAX_TOKENS = 1_024
FORECAST_S = 0.03  # §IV-D
RMSE_TOKENS = 15.649  # Table II: USIN, the full predictor, with ChatGLM-6B
# Θ is 0.7 of the memory beside the weights, which the profile's KV capacity is.
WHOLE_MEMORY = {"zeta": 1.0}
# 0.7 of 32 GB less weights of 4 bits, in the profile's bytes per token.
QUANTIZED_KV_TOKENS = 22_048
NOTES = (
    "Lengths: the paper prints none. The tasks of the workload magnus follow its text and the two "
    "errors of its Table II. Nor are its rates printed; vs is overloaded at all of these, and at "
    "4/s only a little, where the gains are least.",
    "Predictor: glp, abp and magnus forecast the true length with a normal error of 15.6 tokens, "
    "which is the paper's for ChatGLM-6B (Table II). magnus-oracle has no error; magnus-words "
    "reads prompts and learns while it serves, from nothing. A request is batched once it has its "
    "forecast.",
    "Serving time: the paper's KNN learns it from served batches. Here it is the profile's own "
    "cost model, which makes no error of its own.",
    "vsq: in the paper its 4-bit weights slow each step and lengthen answers, so that it serves "
    "less than vs; neither number is printed. Here it is vs with the batch size of 10, so that the "
    "gain over it is smaller.",
    "ccb: the paper's implementation pauses for each joining prompt and makes fewer tokens per "
    "second, valid or not, than vs; its step times are not printed. Here a continuous step costs "
    "no more than a static one, and 7 requests without padding and invalid tokens finish sooner "
    "than magnus' larger batches. The paper's gain over ccb is not reproduced.",
)


served = partial(ServedRun, hardware=HARDWARE, workers=WORKERS, forecast_s=FORECAST_S)
SCHEDULERS: dict[str, ServedRun] = {
    "vs": served("vs"),
    "vsq": served("vsq", kv_tokens=QUANTIZED_KV_TOKENS),
    "ccb": served("ccb"),
    "glp": served("glp", numbers=WHOLE_MEMORY, predictor=GIVEN),
    "abp": served("abp", numbers=WHOLE_MEMORY, predictor=GIVEN),
    "magnus": served("magnus", numbers=WHOLE_MEMORY, predictor=GIVEN),
    "magnus-words": served("magnus", numbers=WHOLE_MEMORY, predictor="words"),
    "magnus-oracle": served("magnus", numbers=WHOLE_MEMORY, predictor="oracle"),
}
NOT_IN_PAPER = ("magnus-words", "magnus-oracle")


def compute_row(name: str, rate: float, requests: int, seed: int) -> Row:
    """Simulates one scheduler of SCHEDULERS at one rate."""
    measures = measure(SCHEDULERS[name], rate, requests, seed)
    return {"rate": rate, "scheduler": name, **measures}


def measure(scheduler: ServedRun, rate: float, requests: int, seed: int) -> Row:
    """Returns the measures of one scheduler. All rates have the same requests and forecasts."""
    workload = build_workload("magnus", requests, "poisson", rate, 0, seed)
    rng = np.random.default_rng([seed, 2])
    forecasts = offset_lengths(workload.output_tokens, RMSE_TOKENS, rng)
    workload = replace(workload, forecast_tokens=forecasts.tolist())
    return scheduler.measure(workload, MAX_TOKENS, seed)


def _cases(requests: int, seed: int) -> list[Case]:
    return [
        Case(
            f"{name} rate={rate:g}",
            partial(compute_row, name, rate, requests, seed),
            name not in NOT_IN_PAPER,
        )
        for rate in RATES
        for name in SCHEDULERS
    ]


def _compare(rows: Sequence[Row]) -> list[Row]:
    return compare_gains(read_gains(__package__, "gains.toml"), rows, "rate")


MAGNUS = Reproduction(
    "Six schedulers at several rates: ChatGLM-6B on seven V100s",
    "Magnus (Cheng et al., ICWS 2024), §IV, Fig. 10 to 13",
    REQUESTS,
    _cases,
    (
        Column("rate", "Rate", "g"),
        Column("scheduler", "Scheduler"),
        Column("requests_per_s", "Requests/s", ".2f"),
        Column("valid_tokens_per_s", "Valid tokens/s", ",.0f"),
        Column("tokens_per_s", "Tokens/s", ",.0f"),
        Column("response_mean_s", "Response s", ".1f"),
        Column("response_p95_s", "P95", ".1f"),
        Column("response_p99_s", "P99", ".1f"),
        Column("batch_size", "Batch", ".1f"),
        Column("padding_tokens", "Padding", ".0f"),
        Column("invalid_tokens", "Invalid", ".0f"),
        Column("evictions", "Evicted", ",d"),
    ),
    list,
    NOTES,
    _compare,
)
