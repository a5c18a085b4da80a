"""The reports of a study: a folder of plots, and a page with tables and plots."""

from collections.abc import Sequence
from pathlib import Path

from simulator.report.calibration import plot_calibration
from simulator.report.figure import Picture, write_png
from simulator.report.page import SimulatedRun, write_page
from simulator.report.plots import plot_distributions, plot_sweep
from simulator.report.run_plots import ObservedRun, plot_gantt, plot_memory
from simulator.study import Finding, Point


def write_reports(
    points: Sequence[Point],
    findings: Sequence[Finding],
    key: str,
    folder: Path | None,
    page: Path | None,
) -> None:
    """Writes the plots to a folder and the page to a file, where given. `key` is the swept key,
    empty without one. Equal studies give equal bytes. Raises ValueError if a file cannot be
    written."""
    pictures = _draw_sweep(findings, key) if key else _draw_runs(points, findings)
    if folder:
        for picture in pictures:
            write_png(folder / f"{picture.name}.png", picture.figure)
    if page:
        runs = [SimulatedRun(point.settings, point.workload) for point in points]
        write_page(page, runs, [(each.keys, each.summary) for each in findings], pictures)


def _draw_sweep(findings: Sequence[Finding], key: str) -> list[Picture]:
    rows = [(finding.keys, finding.summary) for finding in findings]
    caption = "One run for each preset and value. Latencies are of finished requests."
    return [Picture(key, f"Figures against {key}", caption, plot_sweep(key, rows))]


def _draw_runs(points: Sequence[Point], findings: Sequence[Finding]) -> list[Picture]:
    records = {finding.summary.preset: finding.records for finding in findings}
    pictures = [
        Picture(
            "latency",
            "Distributions of latency",
            "The share of finished requests up to each value.",
            plot_distributions(records),
        )
    ]
    observed = {
        finding.summary.preset: ObservedRun(
            finding.records,
            finding.observations,
            tuple(hardware.kv_tokens for hardware in point.settings.hardware),
        )
        for point, finding in zip(points, findings, strict=True)
        if finding.observations
    }
    if not observed:
        return pictures
    forecasts = {name: run.observations.forecasts for name, run in observed.items()}
    return [
        *pictures,
        Picture(
            "memory",
            "KV memory over time",
            "The peaks are those of the running requests, if no other is admitted (Past-Future, "
            "Eq. 2–4): with lengths drawn from their forecasts, and with their true lengths.",
            plot_memory(observed),
        ),
        Picture(
            "gantt",
            "Requests over time",
            "The requests in the middle of the workload, in order of arrival. A request runs from "
            "its admission by the scheduler.",
            plot_gantt(observed),
        ),
        Picture(
            "calibration",
            "Calibration of length forecasts",
            "Forecasts at arrival beside true lengths, both up to max_tokens. In a calibrated "
            "forecast each tenth has a tenth of the answers.",
            plot_calibration(forecasts),
        ),
    ]
