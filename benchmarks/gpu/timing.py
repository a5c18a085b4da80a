"""Times calls on a CUDA device, and measures the copy rates that are their ceilings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.report import Figure, figure

GIB = 2**30


def event() -> torch.cuda.Event:
    """Records an event on the current stream."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # PyTorch gives it no types
    made.record()
    return made


def times_s(work: Callable[[], object], repeats: int, inner: int = 1) -> Figure:
    """Returns the seconds of one call by the device's clock: `repeats` runs of `inner` calls each,
    after three calls that compile the kernels and fill caches."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    runs = []
    for _ in range(repeats):
        start = event()
        for _ in range(inner):
            work()
        runs.append((start, event()))
    torch.cuda.synchronize()
    return figure([start.elapsed_time(end) / 1000 / inner for start, end in runs])


@dataclass(frozen=True)
class Measurement:
    """One figure with its target: a minimum, or a maximum if `at_most`."""

    name: str
    figure: Figure
    unit: str = ""
    target: float | None = None
    at_most: bool = False

    @property
    def met(self) -> bool | None:
        if self.target is None:
            return None
        median = self.figure.median
        return median < self.target if self.at_most else median >= self.target

    @property
    def row(self) -> tuple[str, str, str, str]:
        """The row of the table."""
        sign = "<" if self.at_most else "≥"
        target = "" if self.target is None else f"{sign} {self.target:g}"
        met = {None: "", True: "yes", False: "NO"}[self.met]
        return self.name, f"{self.figure} {self.unit}".strip(), target, met

    @property
    def data(self) -> dict[str, Any]:
        """The entry of the JSON record."""
        return {
            "median": self.figure.median,
            "values": list(self.figure.values),
            "unit": self.unit,
            "target": self.target,
            "at_most": self.at_most,
            "met": self.met,
        }


def rates(amount: float, seconds: Figure) -> Figure:
    """Returns `amount` per second for each repeat."""
    return figure([amount / s for s in seconds.values])


def copy_ceiling(repeats: int) -> Figure:
    """Returns bytes per second, read and written, of a copy larger than any cache."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return rates(2 * GIB, times_s(lambda: target.copy_(source), repeats))


def pinned_ceilings(repeats: int) -> tuple[Figure, Figure]:
    """Returns bytes per second to pinned host memory, and from it."""
    device = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
    host = torch.empty(GIB // 2, dtype=torch.uint8, pin_memory=True)
    down = times_s(lambda: host.copy_(device, non_blocking=True), repeats)
    up = times_s(lambda: device.copy_(host, non_blocking=True), repeats)
    return rates(GIB / 2, down), rates(GIB / 2, up)
