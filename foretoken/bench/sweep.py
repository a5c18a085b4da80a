"""A rate sweep: the same benchmark at several request rates, and the table of its results."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from foretoken.bench.report import as_json, format_cell, headlines, make_table
from foretoken.bench.run import OnProgress, Outcome, Plan, bench


@dataclass(frozen=True)
class RateResult:
    """The outcome of each server at one request rate."""

    plan: Plan
    outcomes: Sequence[Outcome]


async def sweep(
    plan: Plan, rates: Sequence[float], stop: asyncio.Event, on_progress: OnProgress
) -> list[RateResult]:
    """Runs `plan` at each rate, in requests per second, ascending; ends early once `stop` is set.

    Raises ValueError where a server cannot be loaded.
    """
    results: list[RateResult] = []
    for rate in sorted(rates):
        if stop.is_set():
            break
        at_rate = replace(plan, load=replace(plan.load, rate=rate))
        results.append(RateResult(at_rate, await bench(at_rate, stop, on_progress)))
    return results


def sweep_tables(results: Sequence[RateResult]) -> RenderableType:
    """Returns one table per server: a column per rate, medians of its rounds."""
    if not results:
        return Text("stopped before anything was measured")
    parts: list[RenderableType] = []
    for number, first in enumerate(results[0].outcomes):
        rates = (f"{result.plan.load.rate:g}" for result in results)
        table = make_table("requests/s offered", *rates)
        for headline in headlines(results[0].plan.classes):
            cells = []
            for result in results:
                values = map(headline.value, result.outcomes[number].figures)
                cells.append(format_cell(list(values), headline.format))
            table.add_row(headline.name, *cells)
        title = f"{first.url}, {first.model}: {first.workload}"
        parts += [Text(title, style="bold"), table]
    return Group(*parts)


def sweep_json(results: Sequence[RateResult]) -> Mapping[str, object]:
    """Returns the full results of every rate."""
    return {"rates": [as_json(result.outcomes, result.plan) for result in results]}
