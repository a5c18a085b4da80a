"""Plots latency per token and goodput against load from a record of `benchmarks.overload`.

python -m benchmarks.overload.plot overload.json --out docs/images/load.svg
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

Rows = Mapping[str, Mapping[str, Mapping[str, float]]]  # system → load factor → figures
# Axis label, scale, and the figures of a panel with their line styles.
PANELS = (
    ("s per token: mean, p99 dashed", "log",
     {"norm_latency_s": "-", "norm_latency_p99_s": "--"}),
    ("goodput, share of all arrivals", "linear", {"goodput_share": "-"}),
)  # fmt: skip


def read_rows(record: Path, systems: list[str]) -> Rows:
    """Returns the figures of `systems`. Raises SystemExit if the record lacks one."""
    content = json.loads(record.read_text())
    if missing := [system for system in systems if system not in content]:
        raise SystemExit(f"{record} has no row for {', '.join(missing)}")
    return {system: cast(Mapping[str, Mapping[str, float]], content[system]) for system in systems}


def draw(rows: Rows, title: str, out: Path) -> None:
    """Writes a plot with a panel for each figure and a line for each system."""
    pyplot.rcParams.update({"svg.hashsalt": "foretoken", "font.size": 10})
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(9, 3.4), layout="constrained")
    for axis, (label, scale, styles) in zip(axes, PANELS, strict=True):
        for number, (system, by_factor) in enumerate(rows.items()):
            factors = sorted(by_factor, key=float)
            for key, style in styles.items():
                axis.plot(
                    [float(factor) for factor in factors],
                    [by_factor[factor][key] for factor in factors],
                    f"o{style}C{number}",
                    label=system if style == "-" else None,
                )
        axis.set(xlabel="load, multiples of capacity", ylabel=label, yscale=scale)
        axis.grid(alpha=0.3)
    axes[0].legend()
    figure.suptitle(title, fontsize=10)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("record", type=Path, help="JSON record of benchmarks.overload")
    parser.add_argument("--systems", default="foretoken,fcfs,vllm", help="separated by commas")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True, help="file of the plot")
    options = parser.parse_args()
    draw(read_rows(options.record, options.systems.split(",")), options.title, options.out)


if __name__ == "__main__":
    main()
