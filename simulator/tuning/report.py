"""What tuning found: tables, the settings to paste, and rows of JSON."""

from collections.abc import Mapping, Sequence
from math import isfinite, isnan
from statistics import fmean

from rich.table import Table

from services.policies.preset import Preset
from simulator.report.summary import Summary, summary_row
from simulator.rows import Row
from simulator.tuning.ranges import Range
from simulator.tuning.search import Setting, Trial
from simulator.tuning.tune import Evaluated, Objective, Tuned

_FIGURES: tuple[tuple[str, str, str], ...] = (  # key, heading, format
    ("goodput", "goodput", ".1%"),
    ("token_latency_mean_s", "s/token", ".3g"),
    ("token_latency_p99_s", "p99", ".3g"),
    ("ttft_mean_s", "TTFT s", ".3g"),
    ("ttft_p99_s", "p99", ".3g"),
    ("e2e_mean_s", "end to end s", ".3g"),
    ("e2e_p99_s", "p99", ".3g"),
    ("output_tokens_per_s", "tokens/s", ",.0f"),
)


def figures_table(tuned: Tuned, title: str) -> Table:
    """The start's figures beside the best's: means over the scenarios, and the least and the most
    below them; likewise on the test traces."""
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("on")
    table.add_column("setting")
    for _, heading, _ in _FIGURES:
        table.add_column(heading, justify="right")
    parts = [(f"{len(tuned.scenarios)} training runs", tuned.start, tuned.best)]
    if tuned.tested:
        names, start, best = tuned.tested
        parts.append((f"{len(names)} test runs", start, best))
    for on, start, best in parts:
        for name, evaluated in (("start", start), ("best", best)):
            cells = [_spread(evaluated.summaries, key, style) for key, _, style in _FIGURES]
            table.add_row(on, name, *cells)
    return table


def _spread(summaries: Sequence[Summary], key: str, style: str) -> str:
    values = [float(getattr(summary, key)) for summary in summaries]
    if any(map(isnan, values)):
        return "–"
    mean = format(fmean(values), style)
    if len(values) == 1:
        return mean
    return f"{mean}\n{min(values):{style}}–{max(values):{style}}"


def numbers_table(tuned: Tuned, ranges: Mapping[str, Range]) -> Table:
    """The numbers, the most sensitive first: start, best, tried range, and how much the objective
    changes over it."""
    table = Table(title="numbers", title_justify="left", title_style="bold")
    unit = "%" if tuned.objective.relative else "points"
    headings = ("start", "best", "range", f"change over range, {unit}", "best value there")
    table.add_column("number")
    for heading in headings:
        table.add_column(heading, justify="right")
    for each in tuned.sensitivities:
        range_ = ranges[each.key]
        change = tuned.objective.percent(each.change)
        best = max((each.center, *each.trials), key=lambda trial: trial.score)
        table.add_row(
            each.key,
            f"{tuned.start.setting[each.key]:g}",
            f"{tuned.best.setting[each.key]:g}",
            f"{range_.least:g} to {range_.most:g}",
            f"{change:.3g}" if isfinite(change) else "–",
            f"{best.setting[each.key]:g}",
        )
    return table


def conclude(tuned: Tuned, objective: str) -> list[str]:
    """Sentences: what the search gained on the training runs, in how many of them, and on the
    tests."""
    if not tuned.improved:
        return [f"No tried setting has a better {objective} than the start; nothing to change."]
    found = [_compare("training", objective, tuned.objective, tuned.start, tuned.best)]
    if tuned.tested:
        _, start, best = tuned.tested
        found.append(_compare("test", objective, tuned.objective, start, best))
    return found


def _compare(what: str, name: str, objective: Objective, start: Evaluated, best: Evaluated) -> str:
    pairs = zip(start.summaries, best.summaries, strict=True)
    better = sum(objective.score([new]) > objective.score([old]) for old, new in pairs)
    gain = objective.percent(best.score - start.score)
    unit = "%" if objective.relative else "points"
    runs = len(start.summaries)
    change = f"{gain:+.3g} {unit}" if isfinite(gain) else "not comparable"
    return f"{what}: {name} {change}, better in {better} of {runs} runs"


def settings_toml(preset: Preset, setting: Setting) -> str:
    """A row for a file of presets: `foretoken serve --presets FILE --policy NAME`, and
    `foretoken simulate --presets FILE --preset NAME`."""
    numbers = ", ".join(f"{key} = {value!r}" for key, value in setting.items())
    return f'[{preset.name}-tuned]\nlike = "{preset.name}"\nparams = {{ {numbers} }}'


def settings_options(setting: Setting) -> str:
    """The same as options of `foretoken serve`."""
    return " ".join(f"--set preset.{key}={value:g}" for key, value in setting.items())


def result_rows(tuned: Tuned) -> list[Row]:
    """A row for each run of the start and of the best setting, training runs first."""
    rows = _rows("training", tuned.scenarios, tuned.start, tuned.best)
    if tuned.tested:
        rows += _rows("test", *tuned.tested)
    return rows


def _rows(use: str, names: Sequence[str], start: Evaluated, best: Evaluated) -> list[Row]:
    return [
        {"setting": setting, "use": use, "run": name, **summary_row(summary)}
        for setting, evaluated in (("start", start), ("best", best))
        for name, summary in zip(names, evaluated.summaries, strict=True)
    ]


def trial_rows(trials: Sequence[Trial]) -> list[Row]:
    """The settings in the order of the search, with their scores; None without a result."""
    return [
        {"score": trial.score if isfinite(trial.score) else None, **trial.setting}
        for trial in trials
    ]


def sensitivity_rows(tuned: Tuned) -> list[Row]:
    """The change of the objective over each number's range, in percent or points, and the scores at
    each tried value."""
    return [
        {
            "number": each.key,
            "change": _finite(tuned.objective.percent(each.change)),
            "tried": [
                {"value": trial.setting[each.key], "score": _finite(trial.score)}
                for trial in (*each.trials, each.center)
            ],
        }
        for each in tuned.sensitivities
    ]


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
