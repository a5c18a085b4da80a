"""Command-line options, figures with their spread, tables, and the JSON record of a benchmark."""

import argparse
import json
import os
import platform
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

Key = tuple[str, ...]


def parser(description: str | None) -> argparse.ArgumentParser:
    """Parser of `--json` and `--quick`, described by the first line of `description`."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="small sizes, to test the benchmark")
    return parser


def parse_factors(text: str) -> list[float]:
    """Load factors that are separated by commas. Raises SystemExit with a sentence for others than
    positive numbers."""
    try:
        factors = [float(word) for word in text.split(",")]
    except ValueError:
        factors = [0.0]
    if min(factors) <= 0:
        raise SystemExit(f"--factors takes numbers above 0, separated by commas; got {text!r}")
    return factors


@dataclass(frozen=True)
class Figure:
    """Repeats of one measurement, printed as median (lowest–highest)."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        return f"{self.median:,.5g} ({min(self.values):,.5g}–{max(self.values):,.5g})"


def figure(values: Sequence[float]) -> Figure:
    return Figure(tuple(values))


class Measurements:
    """Repeats of many measurements. A key is a path in the JSON record."""

    def __init__(self) -> None:
        self.values: dict[Key, list[float]] = defaultdict(list)

    def add(self, key: Key, value: float) -> None:
        self.values[key].append(value)

    def figure(self, *key: str) -> Figure:
        return figure(self.values[key])

    def median(self, key: Key) -> float | None:
        """Returns None for a key without a measurement."""
        return median(self.values[key]) if key in self.values else None

    def medians(self) -> dict[str, Any]:
        return nested({key: median(values) for key, values in self.values.items()})

    def repeats(self) -> dict[str, Any]:
        return nested(self.values)


def nested(flat: Mapping[Key, object]) -> dict[str, Any]:
    """Returns one dictionary per level of the keys."""
    root: dict[str, Any] = {}
    for key, value in flat.items():
        level = root
        for name in key[:-1]:
            level = level.setdefault(name, {})
        level[key[-1]] = value
    return root


def alternating(names: Sequence[str], rounds: int) -> Iterator[tuple[int, Sequence[str]]]:
    """Yields each round's number and the names, reversed in every other round: a machine that
    slows down then slows all of them."""
    for number in range(rounds):
        yield number, names[:: -1 if number % 2 else 1]


def show(
    title: str, head: Sequence[str], rows: Sequence[Sequence[object]], width: int = 110
) -> None:
    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)


def write(path: Path | None, figures: Mapping[str, Any]) -> None:
    """Writes the figures and a description of the machine; does nothing without a path."""
    machine = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    if path:
        path.write_text(json.dumps({"machine": machine, **figures}, indent=2) + "\n")
