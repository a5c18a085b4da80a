"""Changes of a measure against a baseline, beside the range that a paper prints for them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.papers.document import read_document
from simulator.papers.reproduction import Row, Value

GAIN_KEYS = (
    "scheduler", "baseline", "measure", "low_pct", "high_pct", "paper_low_pct", "paper_high_pct",
    "same_direction",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gain:
    """A change in percent of a scheduler's `measure` over the `baseline`, printed as a range from
    `low` to `high`. `where`: values of the compared rows."""

    measure: str
    scheduler: str
    baseline: str
    low: float
    high: float
    where: Mapping[str, Value]


def read_gains(package: str, name: str) -> list[Gain]:
    """Reads the `gains` of a TOML file of a package."""
    return [Gain(**{"where": {}, **gain}) for gain in read_document(package, name)["gains"]]


def compare_gains(gains: Sequence[Gain], rows: Sequence[Row], key: str) -> list[Row]:
    """Returns a row for each gain, with our range over all pairs of rows that agree in `key`. Gains
    without such rows are left out. O(gains · rows)."""
    compared = []
    for gain in gains:
        matching = [row for row in rows if gain.where.items() <= row.items()]
        base = {row[key]: row for row in matching if row["scheduler"] == gain.baseline}
        changes = [
            _change_pct(row[gain.measure], base[row[key]][gain.measure])
            for row in matching
            if row["scheduler"] == gain.scheduler and row[key] in base
        ]
        if changes:
            compared.append(_row(gain, min(changes), max(changes)))
    return compared


def _change_pct(value: Value, baseline: Value) -> float:
    assert isinstance(value, int | float)
    assert isinstance(baseline, int | float)
    return 100 * (value / baseline - 1)


def _row(gain: Gain, low: float, high: float) -> Row:
    return {
        **gain.where,
        "scheduler": gain.scheduler,
        "baseline": gain.baseline,
        "measure": gain.measure,
        "low_pct": low,
        "high_pct": high,
        "paper_low_pct": gain.low,
        "paper_high_pct": gain.high,
        "same_direction": (low > 0) == (gain.low > 0) and (high > 0) == (gain.high > 0),
    }
