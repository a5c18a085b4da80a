"""Plans as a table, as sentences and as rows of JSON."""

from collections.abc import Mapping, Sequence
from math import isfinite

from rich.table import Table

from simulator.capacity.plan import EnoughWorkers, MissedAlone, Plan, TooFewWorkers
from simulator.capacity.search import RateLimit
from simulator.rows import Row

HOUR_S = 3_600
MILLION = 1_000_000


def usd_per_million(usd_per_hour: float, output_tokens_per_s: float) -> float | None:
    """The cost of a million output tokens; None without a price or without output."""
    if not usd_per_hour or not output_tokens_per_s:
        return None
    return usd_per_hour / (output_tokens_per_s * HOUR_S) * MILLION


def plan_row(plan: Plan) -> Row:
    """A row of the JSON, without the keys that the verdict does not have.

    `share` is that of the requests that met the SLA. `kv_tokens` is a worker's capacity. `rate` is
    what each of the workers carries in requests per second, `rate_of_one` what a single one does;
    at the rate `…_missed` the SLA was missed, None if it was at no tried rate.
    """
    settings = plan.candidate.point.settings
    [hardware] = settings.hardware
    row = {
        "hardware": hardware.name,
        "preset": settings.preset.name,
        "kv_tokens": hardware.kv_tokens,
    }
    match plan.verdict:
        case EnoughWorkers(workers=workers, summary=summary) as enough:
            tokens_per_s = summary.output_tokens_per_s
            usd_per_hour = workers * hardware.usd_per_hour
            return {
                **row,
                "verdict": "enough_workers",
                "workers": workers,
                "share": summary.goodput,
                "kv_share": summary.kv_share,
                "kv_peak_share": summary.kv_peak_share,
                **_rates("rate", enough.rate, workers),
                **_rates("rate_of_one", enough.rate_of_one),
                "output_tokens_per_s": tokens_per_s,
                "usd_per_hour": usd_per_hour or None,
                "usd_per_million_output_tokens": usd_per_million(usd_per_hour, tokens_per_s),
            }
        case TooFewWorkers(workers=workers, share=share, rate_of_one=rate):
            tried = {"verdict": "too_few_workers", "tried_workers": workers, "share": share}
            return {**row, **tried, **_rates("rate_of_one", rate)}
        case MissedAlone(missed=missed):
            return {**row, "verdict": "missed_alone", "missed_alone": missed}


def _rates(key: str, limit: RateLimit | None, workers: int = 1) -> Mapping[str, float | None]:
    kept = limit.kept / workers if limit else None
    missed = limit.missed / workers if limit and isfinite(limit.missed) else None
    return {key: kept, f"{key}_missed": missed}


def explain(plan: Plan) -> str:
    """Why no number of workers or no limit of their rate was found, and what to change; empty if
    both were."""
    name, arrivals = plan.candidate.name, plan.candidate.point.workload.rate
    match plan.verdict:
        case EnoughWorkers(rate=rate):
            if rate is None or isfinite(rate.missed):
                return ""
            return (
                f"{name}: the workload is too short to find the largest rate of its workers; "
                "simulate more requests"
            )
        case TooFewWorkers(workers=workers, share=share, rate_of_one=rate):
            load = f"; one carries {rate.kept:.3g} requests/s of {arrivals:.3g}" if rate else ""
            return (
                f"{name}: {share:.1%} of the requests meet the SLA with {workers:,} workers, the "
                f"most that may be tried{load}"
            )
        case MissedAlone(missed=missed):
            return (
                f"{name}: {missed:.1%} of the requests miss the SLA even alone on a worker; no "
                "number of workers keeps it: choose larger budgets or other hardware"
            )


_COLUMNS: tuple[tuple[str, str, str], ...] = (  # key, heading, format
    ("workers", "workers", ",d"),
    ("share", "SLA met", ".1%"),
    ("kv_share", "KV mean", ".0%"),
    ("kv_peak_share", "KV peak", ".0%"),
    ("rate", "each carries\nrequests/s", ".3g"),
    ("rate_of_one", "one carries\nrequests/s", ".3g"),
    ("output_tokens_per_s", "tokens/s", ",.0f"),
    ("usd_per_hour", "USD/h", ",.2f"),
    ("usd_per_million_output_tokens", "USD/million\noutput tokens", ",.3g"),
)


def plan_table(plans: Sequence[Plan], title: str) -> Table:
    """A line per plan; a dash stands for what was not found or has no price."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("hardware")
    table.add_column("preset")
    for _, heading, _ in _COLUMNS:
        table.add_column(heading, justify="right")
    for row in map(plan_row, plans):
        cells = [_cell(row, key, style) for key, _, style in _COLUMNS]
        table.add_row(str(row["hardware"]), str(row["preset"]), *cells)
    return table


def _cell(row: Row, key: str, style: str) -> str:
    """A rate that is only a bound has a sign: < 2 was missed and nothing kept, ≥ 2 never missed."""
    value, missed_key = row.get(key), f"{key}_missed"
    if value is None:
        return "–"
    if missed_key not in row:
        return format(value, style)
    missed = row[missed_key]
    if missed is None:
        return f"≥ {format(value, style)}"
    return format(value, style) if value else f"< {format(missed, style)}"
