"""SCLS' and Magnus' tables at a small size: directions that their papers print."""

import tomllib
from collections.abc import Iterable

import pytest

from simulator.papers.gains import Gain, compare_gains, read_gains
from simulator.papers.magnus import tables as magnus
from simulator.papers.reproduction import Row
from simulator.papers.scls import tables as scls
from tests.live import ROOT

ENGINES = {engine.name: engine for engine in scls.ENGINES}


def number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return float(value)


def scheduled(engine: str, requests: int, schedulers: Iterable[str]) -> dict[str, Row]:
    return {
        name: scls.compute_row(
            scls.TableRow(ENGINES[engine], scls.SCHEDULERS, name), requests, seed=1
        )
        for name in schedulers
    }


@pytest.fixture(scope="module")
def small() -> dict[str, Row]:
    return scheduled("hf", 800, ("sls", "so", "pm", "scls"))


@pytest.mark.slow
def test_scls_serves_more_than_sls_and_answers_sooner(small: dict[str, Row]) -> None:
    sls, own = small["sls"], small["scls"]
    assert sls["finished"] == own["finished"] == 800
    assert number(own, "requests_per_s") > 2 * number(sls, "requests_per_s")
    assert number(own, "completion_std_s") < number(sls, "completion_std_s")
    for measure in ("response_mean_s", "response_p95_s"):
        assert number(own, measure) < 0.5 * number(sls, measure), measure
    assert number(own, "batch_size") > 1.5 * number(sls, "batch_size")


@pytest.mark.slow
def test_slices_save_invalid_tokens_and_cutting_by_length_saves_padding(
    small: dict[str, Row],
) -> None:
    for slices in ("so", "pm", "scls"):
        assert number(small[slices], "invalid_tokens") < 0.25 * number(
            small["sls"], "invalid_tokens"
        )
    # Each slice is padded again, so that slices alone have the most padding (SCLS, §5.4).
    padding = {name: number(row, "padding_tokens") for name, row in small.items()}
    assert padding["pm"] < padding["sls"] < padding["so"]
    assert number(small["pm"], "batch_size") <= 16 < number(small["scls"], "batch_size")


@pytest.mark.slow
def test_every_part_of_scls_raises_throughput() -> None:
    rows = scheduled("hf", 2_000, ("sls", "so", "pm", "ab", "lb", "scls"))
    rates = [number(row, "requests_per_s") for row in rows.values()]
    assert rates == sorted(rates), dict(zip(rows, rates, strict=True))
    spreads = {name: number(row, "completion_std_s") for name, row in rows.items()}
    assert spreads["scls"] < spreads["sls"]


@pytest.mark.slow
def test_scls_throughput_peaks_between_short_and_long_slices_and_grows_with_workers() -> None:
    def rate(**settings: int) -> float:
        row = scls.TableRow(ENGINES["hf"], scls.SLICING, "scls", **settings)
        return number(scls.compute_row(row, 1_500, 1), "requests_per_s")

    assert rate(slice_tokens=32) < rate(slice_tokens=128) > rate(slice_tokens=1_024)
    assert rate(workers=4) == pytest.approx(4 * rate(workers=1), rel=0.15)


@pytest.fixture(scope="module")
def applications() -> dict[str, Row]:
    names = ("vs", "vsq", "glp", "abp", "magnus")
    return {name: magnus.compute_row(name, 16.0, 600, 1) for name in names}


@pytest.mark.slow
def test_every_part_of_magnus_serves_more_or_answers_sooner(applications: dict[str, Row]) -> None:
    rates = {name: number(row, "requests_per_s") for name, row in applications.items()}
    assert rates["vs"] < rates["glp"] < rates["abp"]
    assert rates["magnus"] > 1.4 * rates["vs"]
    waits = {name: number(row, "response_mean_s") for name, row in applications.items()}
    assert waits["magnus"] < waits["abp"] < waits["glp"] < waits["vs"]
    invalid = {name: number(row, "invalid_tokens") for name, row in applications.items()}
    assert invalid["glp"] < 0.6 * invalid["vs"]


@pytest.mark.slow
def test_magnus_presets_have_the_papers_batch_sizes(applications: dict[str, Row]) -> None:
    sizes = {name: number(row, "batch_size") for name, row in applications.items()}
    assert 6 < sizes["vs"] <= 7 < sizes["vsq"] <= 10
    assert sizes["glp"] <= 7 < sizes["abp"]


def test_gains_of_each_table_are_in_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in (scls.__package__, magnus.__package__):
        assert settings["package-data"][package] == ["*.toml"]


# Gains


def test_gains_are_ranges_over_rows_that_agree_in_the_key() -> None:
    rows: list[Row] = [
        {"rate": 1, "scheduler": "a", "speed": 10.0},
        {"rate": 1, "scheduler": "b", "speed": 15.0},
        {"rate": 2, "scheduler": "a", "speed": 10.0},
        {"rate": 2, "scheduler": "b", "speed": 30.0},
        {"rate": 3, "scheduler": "b", "speed": 1.0},
    ]
    gain = Gain("speed", "b", "a", 60.0, 90.0, {})
    (found,) = compare_gains([gain], rows, "rate")
    assert (found["low_pct"], found["high_pct"]) == pytest.approx((50.0, 200.0))
    assert found["same_direction"]
    (opposed,) = compare_gains([Gain("speed", "b", "a", -9.0, -5.0, {})], rows, "rate")
    assert not opposed["same_direction"]
    assert compare_gains([Gain("speed", "c", "a", 1.0, 2.0, {})], rows, "rate") == []


@pytest.mark.parametrize(
    ("package", "schedulers"),
    [
        (scls.__package__, {name for engine in scls.ENGINES for name in engine.schedulers}),
        (magnus.__package__, set(magnus.SCHEDULERS)),
    ],
)
def test_printed_gains_name_schedulers_of_the_table(package: str, schedulers: set[str]) -> None:
    for gain in read_gains(package, "gains.toml"):
        assert {gain.scheduler, gain.baseline} <= schedulers
        assert gain.low <= gain.high
