"""Comparison tables: every figure is shown, and the best ones are marked."""

from dataclasses import asdict, fields, replace
from math import nan

import pytest

from simulator.engine.simulation import simulate
from simulator.report.comparison import TABLES, Better, compare, percent, three_digits, whole
from simulator.report.summary import Summary, summarize
from tests.simulator.fixtures import settings, workload

ONE = summarize(simulate(settings("fcfs"), workload([(0.0, 10, 3)])))


def column(rows: list[tuple[dict[str, float], Summary]], title: str) -> list[tuple[str, bool]]:
    [table] = [table for table in compare(rows) if title in table.titles]
    at = table.titles.index(title)
    return [(row[at].text, row[at].best) for row in table.rows]


def runs(**columns: list[float]) -> list[tuple[dict[str, float], Summary]]:
    names = list(columns)
    return [
        ({}, Summary(**{**asdict(ONE), **dict(zip(names, values, strict=True))}))
        for values in zip(*columns.values(), strict=True)
    ]


def test_every_figure_of_a_summary_has_a_column():
    shown = [column.key for columns in TABLES.values() for column in columns]
    assert sorted(["preset", *shown]) == sorted(each.name for each in fields(Summary))


def test_p99_stands_beside_the_mean():
    keys = [column.key for columns in TABLES.values() for column in columns]
    for key in keys:
        if key.endswith("_mean_s"):
            assert keys[keys.index(key) + 1] == key.replace("mean", "p99")


def test_lowest_latency_and_highest_goodput_are_best():
    rows = runs(ttft_p99_s=[0.5, 0.25, 1.0], goodput=[0.5, 0.25, 0.75], rows=[1.0, 2.0, 3.0])
    assert column(rows, "TTFT p99") == [("0.500", False), ("0.250", True), ("1.00", False)]
    assert column(rows, "goodput") == [("50.0%", False), ("25.0%", False), ("75.0%", True)]
    assert not any(best for _, best in column(rows, "mean decode rows"))


def test_figures_that_look_equal_are_best_together():
    rows = runs(ttft_mean_s=[0.1234, 0.12341, 0.2], evictions=[3, 3, 3])
    assert column(rows, "TTFT mean") == [("0.123", True), ("0.123", True), ("0.200", False)]
    assert not any(best for _, best in column(rows, "evictions"))


def test_missing_figures_are_not_best():
    rows = runs(ttft_mean_s=[nan, 0.2, 0.3])
    assert column(rows, "TTFT mean") == [("–", False), ("0.200", True), ("0.300", False)]


def test_best_is_among_runs_with_the_same_swept_value():
    rows = [
        ({"rate": float(rate)}, replace(ONE, preset=preset, goodput=goodput))
        for rate, preset, goodput in [(1, "a", 0.9), (1, "b", 0.8), (2, "a", 0.1), (2, "b", 0.2)]
    ]
    table = compare(rows)[1]
    assert table.titles[:3] == ("rate", "preset", "goodput")
    assert table.names == 2
    assert [[cell.text for cell in row[:2]] for row in table.rows] == [
        ["1", "a"], ["1", "b"], ["2", "a"], ["2", "b"]
    ]  # fmt: skip
    assert [row[2].best for row in table.rows] == [True, False, False, True]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04, "0.0400"),
        (143.4, "143"),
        (999.4, "999"),
        (999.9, "1,000"),
        (1_234.5, "1,234"),
        (0.0, "0.00"),
    ],
)
def test_three_digits_are_plain_numbers(value: float, text: str):
    assert three_digits(value) == text


def test_counts_and_shares_are_plain_numbers():
    assert whole(12_345.0) == "12,345"
    assert percent(0.1234) == "12.3%"
    assert {column.better for columns in TABLES.values() for column in columns} == set(Better)
