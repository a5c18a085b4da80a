"""Lengths of the papers' datasets, from files and from quantiles."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from simulator.papers.datasets import FILE, QUANTILES, read_datasets
from tests.simulator.papers.test_table1 import run

NAMES = ("lmsys", "sharegpt", "alpaca")


def rng() -> np.random.Generator:
    return np.random.default_rng(1)


def write(folder: Path, name: str, text: str) -> None:
    path = folder / read_datasets()[name].file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(gzip.compress(text.encode()))


@pytest.mark.parametrize("name", NAMES)
def test_drawn_lengths_have_the_quantiles_of_the_dataset(name):
    dataset = read_datasets()[name]
    drawn = dataset.draw(20_000, 4_096, None, rng())
    assert drawn.origin == QUANTILES
    for tokens, quantiles in (
        (drawn.input_tokens, dataset.input_tokens),
        (drawn.output_tokens, dataset.output_tokens),
    ):
        for level in (0.25, 0.5, 0.75, 0.9):
            expected = quantiles[dataset.levels.tolist().index(level)]
            assert np.quantile(tokens, level) == pytest.approx(expected, rel=0.06, abs=1)


@pytest.mark.parametrize("name", NAMES)
def test_drawn_requests_fit_the_context(name):
    drawn = read_datasets()[name].draw(5_000, 512, None, rng())
    assert (drawn.input_tokens + drawn.output_tokens).max() <= 512
    assert min(drawn.input_tokens.min(), drawn.output_tokens.min()) >= 1


def test_rows_of_a_csv_are_drawn_whole_and_long_ones_left_out(tmp_path):
    write(tmp_path, "lmsys", "input_tokens,output_tokens\n3,4\n5,6\n500,600\n")
    drawn = read_datasets()["lmsys"].draw(50, 100, tmp_path, rng())
    assert drawn.origin == FILE
    pairs = zip(drawn.input_tokens.tolist(), drawn.output_tokens.tolist(), strict=True)
    assert set(pairs) == {(3, 4), (5, 6)}


def test_rows_of_json_lines_are_drawn_and_empty_answers_left_out(tmp_path):
    row = '{{"id": "a", "input_tokens": {}, "output_tokens": {}}}\n'
    write(tmp_path, "alpaca", row.format(3, 4) + "\n" + row.format(5, 0))
    drawn = read_datasets()["alpaca"].draw(20, 100, tmp_path, rng())
    assert set(drawn.input_tokens.tolist()) == {3}


def test_unusable_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(ValueError, match=r"lmsys_nanoflow.csv.gz does not exist"):
        read_datasets()["lmsys"].draw(1, 100, tmp_path, rng())
    write(tmp_path, "alpaca", '{"input_tokens": 3}\n')
    with pytest.raises(ValueError, match=r"each line must be JSON with input_tokens"):
        read_datasets()["alpaca"].draw(1, 100, tmp_path, rng())
    write(tmp_path, "lmsys", "input_tokens,output_tokens\n300,400\n")
    with pytest.raises(ValueError, match=r"no row with at most 100 tokens"):
        read_datasets()["lmsys"].draw(1, 100, tmp_path, rng())


@pytest.mark.slow
def test_reproduce_command_reads_the_folder_of_lengths(tmp_path):
    small = ("ltr", "--rows", "lmsys burst oracle", "--requests", "2", "--lengths", tmp_path)
    missing = run(*small)
    assert missing.returncode == 2
    assert "lmsys_nanoflow.csv.gz does not exist" in " ".join(missing.stderr.split())
    write(tmp_path, "lmsys", "input_tokens,output_tokens\n3,4\n")
    rows = tmp_path / "rows.json"
    found = run(*small, "--json", rows)
    assert found.returncode == 0, found.stderr
    assert json.loads(rows.read_text())["rows"][0]["lengths"] == FILE
