"""Table 1 at a small size, and `foretoken reproduce` as a user types it."""

import json
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from simulator.papers.past_future.table1 import REQUESTS, TABLE1, compute_row, read_table
from simulator.papers.reproduction import Reproduced, Row, reproduce, select_cases
from tests.live import ROOT, command, environment

SMALL = 300
KEYS = {
    "dataset", "scheduler", "parameter", "decoding_steps", "evicted_pct", "current_memory_pct",
    "future_memory_pct", "paper_decoding_steps", "paper_evicted_pct", "paper_current_memory_pct",
    "paper_future_memory_pct",
}  # fmt: skip


def number(row: Row, key: str) -> float:
    value = row[key]
    assert isinstance(value, int | float)
    return float(value)


def small(name: str, requests: int = SMALL) -> Row:
    (found,) = (row for row in read_table() if row.name == name)
    return compute_row(found, requests, 0)


def table(text: str, requests: int) -> Reproduced:
    return reproduce(TABLE1, select_cases(TABLE1.cases(requests, 0), text), 1)


def test_paper_has_nine_schedulers_on_each_dataset() -> None:
    rows = read_table()
    assert Counter(row.dataset for row in rows) == {"D1": 9, "D2": 9, "D3": 9}
    assert len({row.name for row in rows}) == 27
    # Memory is the requests' memory over the steps: printed steps and memory must agree.
    for name in ("D1", "D2", "D3"):
        work = [
            number(row.paper, "decoding_steps") * number(row.paper, "current_memory_pct")
            for row in rows
            if row.dataset == name
        ]
        assert max(work) / min(work) < 1.04


@pytest.mark.parametrize(
    ("name", "measure", "within"),
    [
        ("D1 aggressive watermark=99%", "current_memory_pct", 0.5),
        ("D1 conservative no overcommit", "current_memory_pct", 1.0),
        ("D2 aggressive watermark=95%", "current_memory_pct", 0.5),
        ("D2 conservative no overcommit", "future_memory_pct", 1.0),
        ("D1 optimum", "future_memory_pct", 1.0),
        ("D3 aggressive watermark=90%", "future_memory_pct", 1.0),
    ],
)
def test_memory_of_small_run_matches_paper(name: str, measure: str, within: float) -> None:
    row = small(name)
    assert abs(number(row, measure) - number(row, f"paper_{measure}")) < within


@pytest.mark.parametrize("name", ["D1 conservative no overcommit", "D2 aggressive watermark=90%"])
def test_steps_of_small_run_match_paper(name: str) -> None:
    row = small(name)
    steps = number(row, "decoding_steps") * REQUESTS / SMALL
    assert abs(steps / number(row, "paper_decoding_steps") - 1) < 0.05


def test_evictions_and_steps_keep_the_order_of_the_paper() -> None:
    names = ("aggressive watermark=99%", "aggressive watermark=90%", "past-future reserved=5%")
    eager, watched, foreseen = (small(f"D3 {name}", 150) for name in names)
    assert number(eager, "evicted_pct") > number(watched, "evicted_pct")
    assert number(eager, "evicted_pct") > number(foreseen, "evicted_pct")
    assert number(eager, "decoding_steps") < number(foreseen, "decoding_steps")
    none = small("D3 conservative no overcommit", 150)
    assert number(none, "evicted_pct") == 0
    assert number(none, "decoding_steps") > 1.4 * number(foreseen, "decoding_steps")


@pytest.mark.slow
def test_steps_over_optimum_need_the_optimum() -> None:
    found = table("D3", requests=60)
    assert found.rows[0]["steps_over_optimum_pct"] == 0.0
    names = Counter(row["scheduler"] for row in found.not_in_paper)
    assert names == {"curve": 3, "foretoken": 4, "foretoken-served": 1}
    assert all(row["paper_decoding_steps"] is None for row in found.not_in_paper)
    (alone,) = table("D3 aggressive watermark=99%", requests=60).rows
    assert alone["steps_over_optimum_pct"] is None


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("reproduce", *map(str, arguments)),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        cwd=ROOT,
    )


def test_reproduce_command_prints_and_writes_rows(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    chosen = ("--requests", "30", "--rows", "D3 AGGRESSIVE", "--json", file)
    found = run("past-future-table1", *chosen)
    assert found.returncode == 0, found.stderr
    assert "watermark=99%" in found.stdout and "227,250" in found.stdout
    rows = json.loads(file.read_text())["rows"]
    assert [row["parameter"] for row in rows] == [f"watermark={n}%" for n in (99, 95, 90)]
    assert all(row.keys() >= KEYS for row in rows)


@pytest.mark.slow
def test_reproduce_command_lists_known_tables_and_rows() -> None:
    assert "past-future-table1" in run().stdout
    unknown = run("past-future-table2")
    assert unknown.returncode == 2
    assert "did you mean past-future-table1?" in unknown.stderr
    none = run("past-future-table1", "--rows", "D4")
    assert none.returncode == 2
    assert "no row contains 'D4'" in none.stderr
