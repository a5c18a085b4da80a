"""What a benchmark found, as tables to read and as JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite, isnan, nan
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
        "itl_s": "between messages",
        "longest_gap_s": "longest gap",
        "e2e_s": "end to end",
    }
)
LATE_S = 0.01  # from there on the client's own lateness is worth a word
BUSY = 0.8  # of a core, likewise


@dataclass(frozen=True)
class Headline:
    """A figure that servers are compared by: its key in JSON, its name, and how it is spelled."""

    key: str
    name: str
    take: Callable[[Figures], float]
    shown: Callable[[float], str]


def ms(seconds: float) -> str:
    """As milliseconds."""
    return number(seconds * 1e3)


def number(value: float) -> str:
    if isnan(value):
        return "–"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def share(value: float) -> str:
    return "–" if isnan(value) else f"{value:.1%}"


def tables(outcomes: Sequence[Outcome], plan: Plan) -> Iterator[RenderableType]:
    """To print one after the other: a server's own, or, of several rounds, one beside another."""
    heard = [outcome for outcome in outcomes if outcome.figures]
    if not heard:
        yield Text("stopped before anything was measured")
    elif len(outcomes) == 1 and len(heard[0].figures) == 1:
        yield _one(heard[0], plan)
    else:
        yield _beside(heard, plan)
    for outcome in heard:
        yield from map(Text, _remarks(outcome, plan, named=len(outcomes) > 1))


def _one(outcome: Outcome, plan: Plan) -> RenderableType:
    found, [went] = outcome.figures[0], outcome.rounds
    title = f"{outcome.url}, {outcome.model}: {went.load}, {outcome.asked}"
    times = _table("ms", "mean", "p50", "p90", "p99", "most")
    for name, spread in found.latencies.items():
        times.add_row(NAMES[name], *map(ms, _of(spread)))
    rates = _table("", "")
    rates.add_row("whole answers", f"{found.whole} of {found.requests} in {found.lasted_s:.1f} s")
    rates.add_row("requests/s", number(found.requests_per_s))
    rates.add_row("output tokens/s", number(found.tokens_per_s))
    rates.add_row("tokens in, out", f"{found.prompt_tokens:,}, {found.output_tokens:,}")
    rates.add_row("at once, at most", str(found.at_once))
    for name, good in found.goodput.items():
        kept = f"{good.met} of {good.of}, {share(good.share)}, {number(good.per_s)}/s"
        rates.add_row(f"goodput, {name}", f"{kept}  ({said(plan.classes[name])})")
    return Group(Text(title, style="bold"), times, rates)


def _beside(outcomes: Sequence[Outcome], plan: Plan) -> RenderableType:
    """Medians of the rounds with their spread, a column a server."""
    rounds = max(len(outcome.figures) for outcome in outcomes)
    spread = "median (lowest–highest)" if rounds > 1 else "one each"
    names = [f"{outcome.url}\n{outcome.model}" for outcome in outcomes]
    pair = len(outcomes) == 2
    title = f"{plan.load}, {outcomes[0].asked}; {rounds} round(s), {spread}"
    table = _table("", *names, *(["second / first"] if pair else []))
    for headline in headlines(plan.classes):
        values = [list(map(headline.take, outcome.figures)) for outcome in outcomes]
        cells = [_cell(each, headline.shown) for each in values]
        table.add_row(headline.name, *cells, *([_ratio(*values)] if pair else []))
    return Group(Text(title, style="bold"), table)


def headlines(classes: Mapping[str, Budgets]) -> list[Headline]:
    """What servers are compared by."""

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


def _cell(values: Sequence[float], shown: Callable[[float], str]) -> str:
    known = [value for value in values if not isnan(value)]
    if not known:
        return "–"
    middle = shown(median(known))
    return middle if len(known) < 2 else f"{middle} ({shown(min(known))}–{shown(max(known))})"


def _ratio(first: Sequence[float], second: Sequence[float]) -> str:
    below = median(first) if first else nan
    return number(median(second) / below) if below and second else "–"


def _remarks(outcome: Outcome, plan: Plan, named: bool) -> Iterator[str]:
    who = f"{outcome.url}: " if named else ""
    errors: dict[str, int] = {}
    for found in outcome.figures:
        for problem, times in found.errors.items():
            errors[problem] = errors.get(problem, 0) + times
    for problem, times in errors.items():
        yield f"{who}{times} × {problem}"
    if not all(found.counted for found in outcome.figures):
        yield f"{who}tokens are counted by messages with text: the server tells no usage"
    if any(went.stopped for went in outcome.rounds):
        went = outcome.rounds[-1]
        sent = f"{outcome.figures[-1].requests}{f' of {plan.load.most}' if plan.load.most else ''}"
        yield f"{who}stopped after {sent} requests, {went.lasted_s:.1f} s"
    late_s = max((found.late_s.p99 for found in outcome.figures), default=nan)
    cpu = max((found.client_cpu for found in outcome.figures), default=0.0)
    if late_s > LATE_S or cpu > BUSY:
        yield (
            f"{who}this client was busy: {cpu:.0%} of a core, 99 of 100 requests sent within "
            f"{ms(late_s)} ms of their time"
        )


def said(budgets: Budgets) -> str:
    """`ttft_s=1, tpot_s=0.05`; what is infinite is left out."""
    given = {key: value for key, value in asdict(budgets).items() if value != inf}
    return ", ".join(f"{key}={value:g}" for key, value in given.items()) or "no budgets"


def _of(spread: Spread) -> tuple[float, ...]:
    return spread.mean, spread.p50, spread.p90, spread.p99, spread.most


def _table(*head: str) -> Table:
    table = Table(show_header=any(head), box=None)
    for place, name in enumerate(head):
        table.add_column(name, justify="left" if place == 0 or len(head) == 2 else "right")
    return table


def as_json(outcomes: Sequence[Outcome], plan: Plan) -> dict[str, object]:
    """All figures by round, the medians that servers are compared by, and every request."""
    known = headlines(plan.classes)
    servers = [
        {
            "url": outcome.url,
            "model": outcome.model,
            "asked": outcome.asked,
            "medians": {h.key: median(map(h.take, outcome.figures)) for h in known}
            if outcome.figures
            else {},
            "rounds": [
                {**asdict(found), "stopped": went.stopped, "samples": list(map(_row, went.samples))}
                for found, went in zip(outcome.figures, outcome.rounds, strict=True)
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
        "ttft_s": sample.ttft_s if sample.whole else None,
        "tpot_s": sample.tpot_s if sample.whole else None,
        "longest_gap_s": sample.longest_gap_s if sample.whole else None,
        "e2e_s": sample.e2e_s if sample.whole else None,
        "prompt_tokens": sample.prompt_tokens,
        "output_tokens": sample.output_tokens,
        "finish_reason": sample.finish_reason,
        "problem": sample.problem,
    }


def _finite(value: object) -> object:
    """JSON knows neither NaN nor infinity: they are null."""
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list) else value
