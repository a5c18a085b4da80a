"""Formats a result as JSON rows and terminal tables."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from lab.data.split import JudgedRows
from lab.evaluation.judge import Judgement
from lab.evaluation.magnus_ladder import Ladder
from services.predictor.learning.scorecard import tau_b
from services.predictor.models.oracle import SOURCE as ORACLE

JsonRow = dict[str, object]

HIGH, LOW, NEITHER = 1, -1, 0
COLUMNS = {  # key of the JSON row: heading, decimals, better direction
    "tau": ("tau", 3, HIGH),
    "tau_online": ("online", 3, HIGH),
    "rmse": ("RMSE", 1, LOW),
    "mae": ("MAE", 1, LOW),
    "mean_relative_error": ("rel", 2, LOW),
    "bucket_accuracy": ("bucket", 3, HIGH),
    "pinball": ("pinball", 2, LOW),
    "pinball_online": ("online", 2, LOW),
    "crps": ("CRPS", 1, LOW),
    "coverage_50": ("in 50%", 3, NEITHER),
    "coverage_90": ("in 90%", 3, NEITHER),
    "ms_batch1": ("ms", 2, LOW),
    "ms_cached": ("cached", 3, LOW),
    "ms_batch64": ("of 64", 3, LOW),
}


@dataclass(frozen=True)
class EvaluationResult:
    """Results of `foretoken evaluate`.

    draws: by data set, tau-b between a row's length and that of another answer to the same prompt,
      which bounds a ranking of sampled answers.
    ladders: by data set, then task ("" for the whole set); "" for all sets together.
    earlier: rows of an earlier report with in-domain taus.
    """

    judgements: Sequence[Judgement]
    draws: Mapping[str, float] = field(default_factory=dict)
    ladders: Mapping[str, Ladder] = field(default_factory=dict)
    earlier: Sequence[JsonRow] = ()


def draws_agree(judged: Sequence[JudgedRows]) -> dict[str, float]:
    """Returns `EvaluationResult.draws`."""
    draws = {}
    for part in judged:
        pairs = [(row.output_tokens, row.references[0]) for row in part.rows if row.references]
        if len(pairs) > 1:
            draws[part.name] = tau_b(*np.array(pairs, np.float64).T)
    return draws


def as_rows(result: EvaluationResult) -> list[JsonRow]:
    """Returns one row per data set and predictor."""
    return [_as_row(judgement, result) for judgement in result.judgements]


def _as_row(judgement: Judgement, result: EvaluationResult) -> JsonRow:
    timing, online = judgement.timing, judgement.online
    ladder = result.ladders.get(judgement.data, {})
    return {
        "data": judgement.data,
        "predictor": judgement.predictor,
        "in_domain": judgement.in_domain,
        "n_train": judgement.n_train,
        **asdict(judgement.scores),
        "ms_batch1": timing.ms_batch1 if timing else None,
        "ms_cached": timing.ms_cached if timing else None,
        "ms_batch64": timing.ms_batch64 if timing else None,
        "online_outcomes": online.outcomes if online else None,
        "n_online": online.scores.n if online else None,
        "tau_online": online.scores.tau if online else None,
        "pinball_online": online.scores.pinball if online else None,
        "coverage_90_online": online.scores.coverage_90 if online else None,
        "tau_in_domain": _earlier_tau(judgement, result.earlier),
        "tau_draws": result.draws.get(judgement.data),
        "ladder": ladder.get("", {}),
        "ladder_tasks": {task: errors for task, errors in ladder.items() if task},
        "ladder_all_sets": result.ladders.get("", {}).get("", {}),
    }


def _earlier_tau(judgement: Judgement, earlier: Sequence[JsonRow]) -> object:
    """Returns the predictor's in-domain tau on the same data set in the earlier report."""
    for row in earlier:
        if (row.get("data"), row.get("predictor")) == (judgement.data, judgement.predictor):
            return row.get("tau") if row.get("in_domain") else None
    return None


def write_json(path: Path, rows: Sequence[JsonRow]) -> None:
    """Writes the rows; NaN and infinities become null. Raises ValueError if not writable."""
    text = json.dumps([_plain(row) for row in rows], indent=1, ensure_ascii=False, allow_nan=False)
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def read_json(path: Path) -> list[JsonRow]:
    """Reads the rows of an earlier report. Raises ValueError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is not a report of an earlier run: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path} is not a report of an earlier run: not a list of rows")
    return rows


def _plain(value: object) -> object:
    if isinstance(value, float) and not isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def tables(rows: Sequence[JsonRow]) -> Iterator[Table]:
    """Yields one table per data set with the best value of each column in bold, except for the
    oracle."""
    for data in dict.fromkeys(row["data"] for row in rows):
        of_set = [row for row in rows if row["data"] == data]
        yield _table(of_set)
        if of_set[0]["ladder"]:
            yield _ladder_table(f"{data}: Magnus' ladder, RMSE in tokens", of_set[0])


def _table(rows: Sequence[JsonRow]) -> Table:
    first = rows[0]
    domain = "in domain" if first["in_domain"] else "not trained on"
    trained = int(max(number(row, "n_train") for row in rows))
    title = f"{first['data']}: {first['n']:,} rows judged, {trained:,} trained, {domain}"
    table = Table(title=title, caption=_caption(rows), box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("predictor", min_width=9)
    shown = [key for key in COLUMNS if any(row[key] is not None for row in rows)]
    for key in shown:
        table.add_column(COLUMNS[key][0], justify="right")
    best = {key: _best(rows, key) for key in shown}
    for row in rows:
        cells = [_cell(row, key, best[key]) for key in shown]
        table.add_row(str(row["predictor"]), *cells)
    return table


def _caption(rows: Sequence[JsonRow]) -> str:
    first = rows[0]
    notes = []
    if isinstance(first["tau_draws"], float):
        notes.append(f"another answer to the same prompt agrees at tau {first['tau_draws']:.3f}")
    online = next((row for row in rows if row["online_outcomes"]), None)
    if online:
        counts = f"{online['n_online']} validation rows after {online['online_outcomes']} outcomes"
        notes.append(f"online: {counts}")
    for row in rows:  # share of the in-domain tau that online learning recovers
        in_domain, recovered = row["tau_in_domain"], row["tau_online"]
        if isinstance(in_domain, float) and isinstance(recovered, float) and in_domain > 0:
            share = f"{recovered / in_domain:.0%} of its in-domain tau {in_domain:.3f}"
            notes.append(f"{row['predictor']}: {share}")
    return "; ".join(notes)


def _best(rows: Sequence[JsonRow], key: str) -> float:
    sign = COLUMNS[key][2]
    numbers = [sign * number(row, key) for row in rows if row["predictor"] != ORACLE]
    return sign * max(filter(isfinite, numbers), default=nan) if sign else nan


def number(row: JsonRow, key: str) -> float:
    """Returns a cell as a number; NaN for other values."""
    value = row[key]
    return float(value) if isinstance(value, float | int) else nan


def _cell(row: JsonRow, key: str, best: float) -> Text:
    value = number(row, key)
    if not isfinite(value):
        return Text("–")
    is_best = value == best and row["predictor"] != ORACLE
    return Text(f"{value:.{COLUMNS[key][1]}f}", style="bold" if is_best else "")


def _ladder_table(title: str, row: JsonRow) -> Table:
    groups = {"this set": row["ladder"], "all sets": row["ladder_all_sets"]}
    tasks = row["ladder_tasks"]
    if isinstance(tasks, dict) and len(tasks) > 1:
        groups |= tasks
    table = Table(title=title, box=SIMPLE_HEAD)
    table.add_column("rows")
    for method in row["ladder"] if isinstance(row["ladder"], dict) else ():
        table.add_column(method, justify="right")
    for name, errors in groups.items():
        if isinstance(errors, dict):
            table.add_row(name, *(f"{error:.2f}" for error in errors.values()))
    return table
