"""Plots: what they draw, calibration worked out by hand, and their files."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from services.forecast import Forecast
from simulator.engine.observations import ForecastRecords
from simulator.engine.settings import ObservationLimits
from simulator.engine.simulation import RunResult, simulate
from simulator.report.calibration import measure_calibration, plot_calibration
from simulator.report.figure import COLOURS, draw_svg, line_styles, thinned, write_png
from simulator.report.plots import cumulative, plot_distributions, plot_sweep
from simulator.report.run_plots import ObservedRun, plot_gantt, plot_memory
from simulator.report.summary import summarize
from tests.simulator.fixtures import SMALL, random_workload, settings, workload

TIGHT = replace(SMALL, kv_tokens=512)


def run(preset: str, workers: int = 1) -> RunResult:
    made = replace(settings(preset, TIGHT, workers), observe=ObservationLimits())
    return simulate(made, random_workload(4, 30, 40.0))


def observed(result: RunResult) -> ObservedRun:
    assert result.observations is not None
    capacities = tuple(hardware.kv_tokens for hardware in result.settings.hardware)
    return ObservedRun(result.records, result.observations, capacities)


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


# Calibration

POINTS = Forecast((2.0, 4.0, 8.0, 16.0), (0.25,) * 4, 16)


def test_calibration_matches_worked_example():
    """Of length 4 the forecast covers 0.25 to 0.5: a fifth of it lies in the third tenth and two
    fifths in each of the next two. Length 5 is at 0.5, in the fifth tenth. Length 1 is below all
    points, in the first tenth and outside the interval 2 to 16. Three requests have a forecast."""
    records = ForecastRecords(np.array([4, 5, 1, 9]))
    records.add((str(row), POINTS) for row in range(3))
    found = measure_calibration(records)
    assert found is not None
    third = 1 / 3
    expected = [third, 0, 0.2 * third, 0.4 * third, 1.4 * third, 0, 0, 0, 0, 0]
    assert found.pit.tolist() == pytest.approx(expected)
    assert found.coverage == pytest.approx(2 / 3)
    assert (found.forecasts, found.forecast_mean) == (3, 7.5)
    assert found.true_mean == pytest.approx(10 / 3)
    assert found.absolute_error == pytest.approx((3.5 + 2.5 + 6.5) / 3)


def test_true_lengths_are_calibrated_exactly():
    result = simulate(
        replace(settings("past-future-oracle"), observe=ObservationLimits()),
        random_workload(1, 20, 20.0),
    )
    assert result.observations is not None
    found = measure_calibration(result.observations.forecasts)
    assert found is not None
    assert found.pit.tolist() == pytest.approx([0.1] * 10)
    assert (found.coverage, found.absolute_error) == (1.0, 0.0)


def test_draws_from_the_forecast_are_calibrated():
    rng = np.random.default_rng(0)
    lengths = np.array([POINTS.sample(rng) for _ in range(2_000)], np.int64)
    records = ForecastRecords(lengths)
    records.add((str(row), POINTS) for row in range(len(lengths)))
    found = measure_calibration(records)
    assert found is not None
    assert found.pit.tolist() == pytest.approx([0.1] * 10, abs=0.015)
    assert found.pit.sum() == pytest.approx(1.0)


def test_requests_without_forecasts_have_no_calibration_and_an_empty_plot():
    records = ForecastRecords(np.array([3, 4]))
    assert measure_calibration(records) is None
    figure = plot_calibration({"none": records})
    assert figure.axes[0].get_title("right") == "no request has a forecast"
    assert draw_svg(figure).startswith("<svg")


# What is drawn


def test_memory_plot_shows_shares_of_capacity_and_cuts_high_predictions():
    """`max` predicts 256 tokens for each request, several times the capacity."""
    made = replace(settings("fcfs", TIGHT), predictor="max", observe=ObservationLimits())
    seen = observed(simulate(made, random_workload(4, 30, 40.0)))
    figure = plot_memory({"fcfs": seen})
    [axes] = figure.axes
    running, predicted, true, _ = (np.asarray(line.get_ydata(), float) for line in axes.lines)
    columns = seen.observations.memory.of_worker(0) * 100 / TIGHT.kv_tokens
    assert np.allclose(running, columns[1])
    assert np.allclose(true, columns[3])
    assert columns[2].max() > axes.get_ylim()[1] > predicted.max()
    assert f"its highest is {columns[2].max():,.0f} %" in axes.get_title("left")
    assert legend(figure) == [
        "all KV in use",
        "KV of running requests",
        "predicted peak",
        "true peak",
        "capacity",
    ]


def test_memory_plot_has_a_panel_for_each_of_two_workers():
    figure = plot_memory({name: observed(run(name, workers=3)) for name in ("fcfs", "srtf")})
    titles = [axes.get_title("left").split(";")[0] for axes in figure.axes]
    assert titles == ["fcfs, worker 1", "fcfs, worker 2", "srtf, worker 1", "srtf, worker 2"]


def test_gantt_plot_has_a_bar_for_each_running_interval():
    result = run("fcfs")
    assert result.records.evictions.sum() > 0
    seen = observed(result)
    [axes] = plot_gantt({"fcfs": seen}).axes
    _, bars = (each for each in axes.collections if isinstance(each, LineCollection))
    drawn = [[tuple(point) for point in segment] for segment in bars.get_segments()]
    intervals = seen.observations.timelines.intervals
    assert drawn == [[(e.start_s, e.row), (e.end_s, e.row)] for e in intervals]
    marks = {str(line.get_marker()): len(np.asarray(line.get_ydata())) for line in axes.lines}
    assert marks["|"] == len(result.records.first_s)
    assert marks["x"] == result.records.evictions.sum()
    assert marks["o"] == marks["D"] == 0


def test_sweep_plot_shows_p99_beside_the_mean():
    summaries = [
        ({"clients": clients}, replace(summarize(run(preset)), token_latency_mean_s=clients / 10))
        for clients in (16.0, 1.0)
        for preset in ("fcfs", "srtf")
    ]
    figure = plot_sweep("clients", summaries)
    axes = figure.axes[0]
    assert legend(figure) == ["fcfs", "srtf"]
    assert [line.get_linestyle() for line in axes.lines] == ["-", "--", "-", "--"]
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [1, 16]
    assert np.asarray(axes.lines[0].get_ydata()).tolist() == [0.1, 1.6]
    assert axes.get_xscale() == "log"
    assert [label.get_text() for label in axes.get_xticklabels()] == ["1", "16"]


def test_distributions_of_a_run_without_finished_requests_are_empty():
    refused = simulate(settings("fcfs", max_tokens=64), workload([(0.0, 9_000, 1)]))
    figure = plot_distributions({"none": refused.records})
    assert [len(np.asarray(axes.lines[0].get_xdata())) for axes in figure.axes] == [0] * 4


# Figures


def test_cumulative_line_is_thinned_between_its_ends():
    values, shares = cumulative(np.arange(10_000.0)[::-1])
    assert len(values) == 500
    assert (values[0], values[-1]) == (0.0, 9_999.0)
    assert shares.tolist() == ((values + 1) / 10_000).tolist()
    assert list(thinned(3, 500)) == [0, 1, 2]


def test_line_styles_differ_for_many_presets():
    styles = line_styles(f"preset {number}" for number in range(24))
    assert len(set(styles.values())) == 24
    assert [style.colour for style in styles.values()][:7] == [*COLOURS, COLOURS[0]]


def test_png_that_cannot_be_written_is_named(tmp_path: Path):
    figure = plot_distributions({"fcfs": run("fcfs").records})
    write_png(tmp_path / "latency.png", figure)
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"cannot write .*/none/a.png: No such file"):
        write_png(tmp_path / "none" / "a.png", figure)
