"""Summary of a run: the figures of its tables and JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan

import numpy as np
from rich.table import Table

from services.forecast import Floats
from simulator.engine.simulation import RunResult
from simulator.rows import Row

P99 = 0.99


@dataclass(frozen=True, slots=True)
class Summary:
    """Latencies are of finished requests, in seconds; goodput is of all requests, and its tokens
    those of requests that met their SLA. Rates are over the time from the first arrival to the last
    token. Shares of workers are means over that time: `busy_share` of computing, `kv_share` of KV
    in use, `rows` of decode rows. `prefix_hit_share` is of prompt tokens. `kv_peak_share` is the
    most that any worker used. `waiting` is Learning to Rank's max_waiting (Fu et al., NeurIPS 2024,
    §5.5): the longer of a request's TTFT and its longest gap."""

    preset: str
    requests: int
    finished: int
    rejected: int
    makespan_s: float
    requests_per_s: float
    output_tokens_per_s: float
    ttft_mean_s: float
    ttft_p99_s: float
    tpot_mean_s: float
    tpot_p99_s: float
    gap_p99_s: float
    waiting_mean_s: float
    waiting_p99_s: float
    e2e_mean_s: float
    e2e_p99_s: float
    token_latency_mean_s: float
    token_latency_p99_s: float
    goodput: float
    goodput_tokens_per_s: float
    preemptions: int
    evictions: int
    rounds: int
    busy_share: float
    kv_share: float
    rows: float
    prefix_hit_share: float
    kv_peak_share: float


def summarize(result: RunResult) -> Summary:
    """Returns the figures of one run. O(requests · log requests)."""
    records, settings = result.records, result.settings
    done = records.finished
    met = records.meets(settings.sla)
    start_s = float(records.arrival_s.min())
    span_s = max(float(records.last_s[done].max(initial=start_s)) - start_s, 1e-9)
    tokens = records.tokens
    worker_s = span_s * len(result.usages)
    prefix_asked_tokens = sum(usage.prefix_asked_tokens for usage in result.usages)
    kv_tokens = sum(hardware.kv_tokens for hardware in settings.hardware) * span_s
    return Summary(
        settings.preset.name,
        len(result.workload),
        int(done.sum()),
        int(records.rejected.sum()),
        span_s,
        float(done.sum()) / span_s,
        float(tokens.sum()) / span_s,
        *_mean_p99(records.ttft_s[done]),
        *_mean_p99(records.tpot_s[done]),
        _p99(records.longest_gap_s[done]),
        *_mean_p99(np.maximum(records.ttft_s, records.longest_gap_s)[done]),
        *_mean_p99(records.e2e_s[done]),
        *_mean_p99(records.normalized_s[done]),
        float(met.mean()),
        float(tokens[met].sum()) / span_s,
        int(records.preemptions.sum()),
        int(records.evictions.sum()),
        result.rounds,
        sum(usage.busy_s for usage in result.usages) / worker_s,
        sum(usage.kv_token_s for usage in result.usages) / kv_tokens,
        sum(usage.row_s for usage in result.usages) / worker_s,
        sum(usage.prefix_hit_tokens for usage in result.usages) / max(prefix_asked_tokens, 1),
        max(
            usage.kv_peak_tokens / hardware.kv_tokens
            for usage, hardware in zip(result.usages, settings.hardware, strict=True)
        ),
    )


def _mean_p99(values: Floats) -> tuple[float, float]:
    return (float(values.mean()) if len(values) else nan), _p99(values)


def _p99(values: Floats) -> float:
    return float(np.quantile(values, P99)) if len(values) else nan


def summary_row(summary: Summary, keys: Mapping[str, float] | None = None) -> Row:
    """Returns a row of the JSON: the varied keys, then all figures; None for a figure without
    requests."""
    figures = {
        name: None if isinstance(value, float) and isnan(value) else value
        for name, value in asdict(summary).items()
    }
    return {**(keys or {}), **figures}


_COLUMNS: tuple[tuple[str, str, str], ...] = (  # key, heading, format
    ("ttft_mean_s", "TTFT s", ".3g"),
    ("ttft_p99_s", "p99", ".3g"),
    ("token_latency_mean_s", "s/token", ".3g"),
    ("token_latency_p99_s", "p99", ".3g"),
    ("e2e_mean_s", "end to end s", ".3g"),
    ("e2e_p99_s", "p99", ".3g"),
    ("gap_p99_s", "gap p99", ".3g"),
    ("output_tokens_per_s", "tokens/s", ",.0f"),
    ("goodput", "goodput", ".1%"),
    ("rejected", "rejected", ",d"),
    ("preemptions", "preempted", ",d"),
    ("evictions", "evicted", ",d"),
    ("busy_share", "busy", ".0%"),
    ("kv_share", "KV", ".0%"),
)


def summary_table(rows: Sequence[tuple[Mapping[str, float], Summary]], title: str) -> Table:
    """Returns a table with a line per run: the varied keys, the preset, and its main figures; a
    dash for a figure without requests."""
    table = Table(title=title, title_justify="left", title_style="bold")
    for key in rows[0][0] if rows else ():
        table.add_column(key, justify="right")
    table.add_column("preset")
    for _, heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for keys, summary in rows:
        cells = [_cell(getattr(summary, key), style) for key, _, style in _COLUMNS]
        table.add_row(*(f"{value:g}" for value in keys.values()), summary.preset, *cells)
    return table


def _cell(value: float, style: str) -> str:
    return "–" if isnan(value) else format(value, style)
