"""Reports a benchmark as tables and as JSON."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, isnan, nan
from pathlib import Path
from statistics import median
from types import MappingProxyType

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from foretoken.bench.measures import Budgets, Figures, Spread
from foretoken.bench.run import Outcome, Plan
from foretoken.bench.samples import Sample

NAMES = MappingProxyType(
    {
        "ttft_s": "TTFT",
        "tpot_s": "TPOT",
        "itl_s": "gap",
        "longest_gap_s": "longest gap",
        "e2e_s": "end to end",
    }
)
LATE_S = 0.01  # a client that sends later than this is reported
BUSY = 0.8  # share of a core from which the client is reported as busy


@dataclass(frozen=True)
class Headline:
    """A figure of the comparison: its JSON key, its name, its value and its format."""

    key: str
    name: str
    value: Callable[[Figures], float]
    format: Callable[[float], str]


def ms(seconds: float) -> str:
    return number(seconds * 1e3)


def number(value: float) -> str:
    if isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    return "–" if isnan(value) else f"{value:.1%}"


def tables(outcomes: Sequence[Outcome], plan: Plan) -> Iterator[RenderableType]:
    """Yields the tables to print: details of a single round, or medians side by side."""
    measured = [outcome for outcome in outcomes if outcome.figures]
    if not measured:
        yield Text("stopped before anything was measured")
    elif len(outcomes) == 1 and len(measured[0].figures) == 1:
        yield _single_table(measured[0], plan)
    else:
        yield _comparison_table(measured, plan)
    for outcome in measured:
        yield from map(Text, _warnings(outcome, plan, named=len(outcomes) > 1))


def _single_table(outcome: Outcome, plan: Plan) -> RenderableType:
    found, [result] = outcome.figures[0], outcome.rounds
    title = f"{outcome.url}, {outcome.model}: {result.load}, {outcome.workload}"
    times = make_table("ms", "mean", "p50", "p90", "p99", "max")
    for name, spread in found.latencies.items():
        times.add_row(NAMES[name], *map(ms, _columns(spread)))
    rates = make_table("", "")
    rates.add_row(
        "complete answers", f"{found.completed} of {found.requests} in {found.lasted_s:.1f} s"
    )
    rates.add_row("requests/s", number(found.requests_per_s))
    rates.add_row("output tokens/s", number(found.tokens_per_s))
    rates.add_row("tokens in, out", f"{found.prompt_tokens:,}, {found.output_tokens:,}")
    rates.add_row("peak concurrency", str(found.peak_concurrency))
    for name, good in found.goodput.items():
        met = f"{good.met} of {good.total}, {share(good.share)}, {number(good.per_s)}/s"
        rates.add_row(f"goodput, {name}", f"{met}  ({format_budgets(plan.classes[name])})")
    return Group(Text(title, style="bold"), times, rates)


def _comparison_table(outcomes: Sequence[Outcome], plan: Plan) -> RenderableType:
    """Returns the medians of the rounds with their range, one column per server."""
    rounds = max(len(outcome.figures) for outcome in outcomes)
    spread = "median (lowest–highest)" if rounds > 1 else "one value"
    names = [f"{outcome.url}\n{outcome.model}" for outcome in outcomes]
    pair = len(outcomes) == 2
    title = f"{plan.load}, {outcomes[0].workload}; {rounds} round(s), {spread}"
    table = make_table("", *names, *(["second / first"] if pair else []))
    for headline in headlines(plan.classes):
        values = [list(map(headline.value, outcome.figures)) for outcome in outcomes]
        cells = [format_cell(each, headline.format) for each in values]
        table.add_row(headline.name, *cells, *([_ratio(*values)] if pair else []))
    return Group(Text(title, style="bold"), table)


def headlines(classes: Mapping[str, Budgets]) -> list[Headline]:
    """Returns the figures that servers are compared by."""

    def latency(name: str, part: str) -> Callable[[Figures], float]:
        return lambda found: float(getattr(found.latencies[name], part))

    def good(name: str) -> Callable[[Figures], float]:
        return lambda found: found.goodput[name].share

    return [
        Headline("requests_per_s", "requests/s", lambda found: found.requests_per_s, number),
        Headline("tokens_per_s", "output tokens/s", lambda found: found.tokens_per_s, number),
        *(
            Headline(f"{name}_{part}", f"{NAMES[name]} {part}, ms", latency(name, part), ms)
            for name in NAMES
            for part in ("p50", "p99")
        ),
        *(Headline(f"goodput_{name}", f"goodput, {name}", good(name), share) for name in classes),
        Headline("errors", "errors", lambda found: float(sum(found.errors.values())), number),
    ]


def format_cell(values: Sequence[float], shown: Callable[[float], str]) -> str:
    """Returns the median, with the range if there are several values."""
    known = [value for value in values if not isnan(value)]
    if not known:
        return "–"
    middle = shown(median(known))
    return middle if len(known) < 2 else f"{middle} ({shown(min(known))}–{shown(max(known))})"


def _ratio(first: Sequence[float], second: Sequence[float]) -> str:
    below = median(first) if first else nan
    return number(median(second) / below) if below and second else "–"


def _warnings(outcome: Outcome, plan: Plan, named: bool) -> Iterator[str]:
    prefix = f"{outcome.url}: " if named else ""
    errors: dict[str, int] = {}
    for found in outcome.figures:
        for problem, times in found.errors.items():
            errors[problem] = errors.get(problem, 0) + times
    for problem, times in errors.items():
        yield f"{prefix}{times} × {problem}"
    if not all(found.has_usage for found in outcome.figures):
        yield f"{prefix}tokens are estimated from messages: the server reports no usage"
    if any(result.stopped for result in outcome.rounds):
        last = outcome.rounds[-1]
        total = f" of {plan.load.max_requests}" if plan.load.max_requests else ""
        sent = f"{outcome.figures[-1].requests}{total}"
        yield f"{prefix}stopped after {sent} requests, {last.lasted_s:.1f} s"
    late_s = max((found.late_s.p99 for found in outcome.figures), default=nan)
    cpu = max((found.client_cpu for found in outcome.figures), default=0.0)
    if late_s > LATE_S or cpu > BUSY:
        yield (
            f"{prefix}the client limits the load: it used {cpu:.0%} of a core and sent 1 % of "
            f"requests more than {ms(late_s)} ms late"
        )


def format_budgets(budgets: Budgets) -> str:
    """Returns the finite budgets, as `ttft_s=1, tpot_s=0.05`."""
    given = {key: value for key, value in asdict(budgets).items() if value != inf}
    return ", ".join(f"{key}={value:g}" for key, value in given.items()) or "no budgets"


def _columns(spread: Spread) -> tuple[float, ...]:
    return spread.mean, spread.p50, spread.p90, spread.p99, spread.maximum


def make_table(*head: str) -> Table:
    table = Table(show_header=any(head), box=None)
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place == 0 or len(head) == 2 else "right")
    return table


def as_json(outcomes: Sequence[Outcome], plan: Plan) -> dict[str, object]:
    """Returns all figures by round, the medians, and every request."""
    known = headlines(plan.classes)
    servers = [
        {
            "url": outcome.url,
            "model": outcome.model,
            "workload": outcome.workload,
            "medians": {h.key: median(map(h.value, outcome.figures)) for h in known}
            if outcome.figures
            else {},
            "rounds": [
                {
                    **asdict(found),
                    "stopped": result.stopped,
                    "samples": list(map(_row, result.samples)),
                }
                for found, result in zip(outcome.figures, outcome.rounds, strict=True)
            ],
        }
        for outcome in outcomes
    ]
    load = {**asdict(plan.load), "rounds": plan.rounds, "seed": plan.seed}
    classes = {name: asdict(budgets) for name, budgets in plan.classes.items()}
    return {"load": load, "classes": _finite(classes), "servers": _finite(servers)}


def _row(sample: Sample) -> dict[str, object]:
    return {
        "due_s": sample.due_s,
        "sent_s": sample.sent_s,
        "sla_class": sample.sla_class,
        "ttft_s": sample.ttft_s if sample.complete else None,
        "tpot_s": sample.tpot_s if sample.complete else None,
        "longest_gap_s": sample.longest_gap_s if sample.complete else None,
        "e2e_s": sample.e2e_s if sample.complete else None,
        "prompt_tokens": sample.prompt_tokens,
        "output_tokens": sample.output_tokens,
        "finish_reason": sample.finish_reason,
        "problem": sample.problem,
    }


def _finite(value: object) -> object:
    """Replaces NaN and infinity, which JSON does not have, with null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value


def write_json(path: Path, content: object) -> None:
    """Writes JSON. Raises ValueError if the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None
