"""What every benchmark shares: its options, medians with their spread, and the JSON it writes."""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Options:
    """`--json FILE` and `--quick`, as every benchmark takes them."""

    json: Path | None
    quick: bool


def parser(description: str) -> argparse.ArgumentParser:
    """With what every benchmark takes; one may add to it."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="small sizes: does it run at all?")
    return parser


def options(description: str) -> Options:
    given = parser(description).parse_args()
    return Options(given.json, given.quick)


@dataclass(frozen=True)
class Figure:
    """Repeats of one measurement."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return median(self.values)

    def __str__(self) -> str:
        return f"{self.median:,.5g} ({min(self.values):,.5g}–{max(self.values):,.5g})"


def figure(values: Sequence[float]) -> Figure:
    return Figure(tuple(values))


def machine() -> dict[str, Any]:
    """Where it was measured."""
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def show(
    title: str, head: Sequence[str], rows: Sequence[Sequence[object]], width: int = 110
) -> None:
    table = Table(*head, title=title, title_justify="left")
    for row in rows:
        table.add_row(*map(str, row))
    Console(width=width).print(table)


def write(path: Path | None, figures: dict[str, Any]) -> None:
    if path:
        path.write_text(json.dumps({"machine": machine(), **figures}, indent=2) + "\n")
