"""Times on a CUDA device, and what they are held against."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness.report import Figure, figure

GIB = 2**30


def event() -> torch.cuda.Event:
    """Recorded on the current stream."""
    made = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # PyTorch gives it no types
    made.record()
    return made


def times_s(work: Callable[[], object], repeats: int, inner: int = 1) -> Figure:
    """Seconds of one call, by the device's clock: `repeats` runs of `inner` calls each, after
    three calls that compile and warm."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    spans = []
    for _ in range(repeats):
        start = event()
        for _ in range(inner):
            work()
        spans.append((start, event()))
    torch.cuda.synchronize()
    return figure([start.elapsed_time(end) / 1000 / inner for start, end in spans])


@dataclass(frozen=True)
class Measurement:
    """One measured figure. `reach` is what it should be at least, or at most (`below`)."""

    name: str
    figure: Figure
    unit: str = ""
    reach: float | None = None
    below: bool = False

    @property
    def reached(self) -> bool | None:
        if self.reach is None:
            return None
        median = self.figure.median
        return median < self.reach if self.below else median >= self.reach

    @property
    def row(self) -> tuple[str, str, str, str]:
        """As the table shows it."""
        asked = "" if self.reach is None else f"{'< ' if self.below else '≥ '}{self.reach:g}"
        answer = {None: "", True: "yes", False: "NO"}[self.reached]
        return self.name, f"{self.figure} {self.unit}".strip(), asked, answer

    @property
    def data(self) -> dict[str, Any]:
        """As JSON holds it."""
        return {
            "median": self.figure.median,
            "values": list(self.figure.values),
            "unit": self.unit,
            "reach": self.reach,
            "below": self.below,
            "reached": self.reached,
        }


def rates(amount: float, seconds: Figure) -> Figure:
    """`amount` a second, per repeat."""
    return figure([amount / s for s in seconds.values])


def copy_ceiling(repeats: int) -> Figure:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    source = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return rates(2 * GIB, times_s(lambda: target.copy_(source), repeats))


def pinned_ceilings(repeats: int) -> tuple[Figure, Figure]:
    """Bytes a second to pinned host memory, and from it."""
    device = torch.empty(GIB // 2, dtype=torch.uint8, device="cuda")
    host = torch.empty(GIB // 2, dtype=torch.uint8, pin_memory=True)
    down = times_s(lambda: host.copy_(device, non_blocking=True), repeats)
    up = times_s(lambda: device.copy_(host, non_blocking=True), repeats)
    return rates(GIB / 2, down), rates(GIB / 2, up)
