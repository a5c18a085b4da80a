"""Runs the checks and timings of the GPU benchmark and writes its record."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from random import SystemRandom
from typing import Any

import torch
import triton

from benchmarks.gpu.attention import decode_lines, int8_lines, prefill_lines, store_lines
from benchmarks.gpu.checks import (
    BOUNDS,
    CASES,
    DECODES,
    Outcome,
    attention_error,
    in_types,
    run_fixed,
    run_step,
    store_faults,
)
from benchmarks.gpu.copies import CopyCase, at_rest_faults, copy_cases, round_trip_faults
from benchmarks.gpu.steps import step_lines
from benchmarks.gpu.swaps import overlap_lines, swap_lines
from benchmarks.gpu.timing import Measurement, copy_ceiling, pinned_ceilings
from benchmarks.harness.report import show, write


def faults(device: torch.device, seed: int, quick: bool) -> Iterator[str]:
    """Yields the faults of every kernel with random inputs, as sentences."""
    for case in CASES[:4] if quick else CASES:
        for typed in in_types(case):
            yield from _step_faults(run_step(typed, seed, device))
    for case in DECODES[:4] if quick else DECODES:
        for typed in in_types(case):
            yield from _step_faults(run_fixed(typed, seed, device, padding=3))
    for copied in copy_cases(1, 32)[: 3 if quick else None]:
        found = at_rest_faults(copied, seed, device)
        found += round_trip_faults(copied, seed, device, int8=False)
        yield from (f"copies, {copied.name}: {fault}" for fault in found)
    live = CopyCase("live INT8", 2, 80, torch.float32)
    yield from (f"copies, live INT8: {f}" for f in round_trip_faults(live, seed, device, int8=True))


def _step_faults(outcome: Outcome) -> Iterator[str]:
    case, error = outcome.case, attention_error(outcome)
    if not error < BOUNDS[case.dtype]:  # also true for NaN
        yield f"{case.name}: error {error:.1e} exceeds {BOUNDS[case.dtype]:.0e}"
    yield from (f"{case.name}: {fault}" for fault in store_faults(outcome))


def run_checks(device: torch.device, quick: bool) -> int:
    """Prints the faults and returns their number."""
    seed = SystemRandom().randrange(2**31)
    found = list(faults(device, seed, quick))
    for fault in found:
        print(fault)
    print(f"checks on {device}, seed {seed}: {len(found)} faults")
    return min(len(found), 125)


def timings(quick: bool) -> Iterator[Measurement]:
    """Yields the ceilings, then measurements relative to them."""
    repeats = 3 if quick else 15
    device = copy_ceiling(repeats)
    down, up = pinned_ceilings(repeats)
    yield Measurement("device copy, read and written", device, "B/s")
    yield Measurement("copy to pinned memory", down, "B/s")
    yield Measurement("copy from pinned memory", up, "B/s")
    yield from decode_lines(quick, repeats, device.median)
    yield from int8_lines(quick, repeats)
    yield from prefill_lines(quick, repeats)
    yield from store_lines(quick, repeats, device.median)
    yield from step_lines(quick, repeats)
    yield from swap_lines(quick, repeats, down.median, up.median)
    yield from overlap_lines(quick, repeats)


def describe_device() -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(0)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
    }


def measure(quick: bool, path: Path | None, faults_found: int) -> int:
    """Times, prints and writes everything; returns 0 without faults and with all targets met.

    Cases that do not fit the device's memory are omitted. With --quick there are no
    targets, because its sizes are too small for them.
    """
    torch.manual_seed(0)
    lines = []
    for measured in timings(quick):
        line = replace(measured, target=None) if quick else measured
        print(*line.row, sep="  ", flush=True)
        lines.append(line)
    title = f"{describe_device()['device']}, medians (lowest–highest)"
    show(title, ("figure", "measured", "target", "met"), [line.row for line in lines])
    figures = {line.name: line.data for line in lines}
    write(
        path,
        {"about": describe_device(), "quick": quick, "faults": faults_found, "figures": figures},
    )
    missed = [line for line in lines if line.met is False]
    return 1 if faults_found or missed else 0
