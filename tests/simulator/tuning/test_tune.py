"""`foretoken tune`: whole runs on small traces."""

import gzip
import json
import sys
import tomllib
from pathlib import Path

import pytest

from foretoken.__main__ import main
from services.policies.preset import presets
from simulator.capacity.measured import measure_capacity
from simulator.hardware.hardware import Hardware
from simulator.study import Point
from simulator.workload.recording import write_trace
from tests.simulator.fixtures import BY_HAND, INSTANT, random_workload, settings, workload

HARDWARE = """
[cost]
base_s = 0.01
prefill_token_s = 1e-4
decode_seq_s = 1e-4
context_token_s = 1e-6
[memory]
kv_tokens = 1024
host_tokens = 2048
[engine]
max_running = 16
max_batch_tokens = 128
"""
TUNE = (
    "tune --hardware small.toml --predictor history --keys decay=0.1:2,slice_tokens --trials 4 "
    "--objective latency --load 1.5 --processes 1"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.toml").write_text(HARDWARE)
    for name, seed in (("train", 1), ("other", 2)):
        write_trace(tmp_path / f"{name}.csv", random_workload(seed, 40, 20.0))
    (tmp_path / "again.csv.gz").write_bytes(gzip.compress((tmp_path / "train.csv").read_bytes()))
    return tmp_path


def run(words: str, monkeypatch: pytest.MonkeyPatch) -> int | str | None:
    monkeypatch.setattr(sys, "argv", ["foretoken", *words.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


@pytest.mark.slow
def test_tune_prints_settings_that_serve_reads_and_repeats_its_bytes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(f"{TUNE} --trace train.csv --test other.csv --json a.json", monkeypatch) == 0
    printed = capsys.readouterr().out
    assert run(f"{TUNE} --trace train.csv --test other.csv --json b.json", monkeypatch) == 0
    assert (folder / "a.json").read_bytes() == (folder / "b.json").read_bytes()
    found = json.loads((folder / "a.json").read_text())
    assert len(found["trials"]) == 1 + 4 + 2 * 3
    scores = [trial["score"] for trial in found["trials"]]
    best = found["trials"][scores.index(max(scores))]
    assert found["best"] == [{key: best[key] for key in ("decay", "slice_tokens")}]
    uses = [(row["setting"], row["use"], row["run"]) for row in found["rows"]]
    assert uses == [
        (setting, use, f"{name}, seed {seed}, 1.5 ×")
        for use, name in (("training", "train"), ("test", "other"))
        for setting in ("start", "best")
        for seed in (0, 1)
    ]
    assert {each["number"] for each in found["sensitivity"]} == {"decay", "slice_tokens"}
    if found["best"] == found["start"]:
        assert "nothing to change" in printed
        return
    row = printed[printed.index("[foretoken-tuned]") :].split("\n\n")[0]
    assert tomllib.loads(row)
    (folder / "mine.toml").write_text(row)
    tuned = presets("mine.toml")["foretoken-tuned"]
    assert found["best"][0].items() <= dict(tuned.params).items()
    simulate = "simulate --trace other.csv --hardware small.toml --predictor history --processes 1"
    assert run(f"{simulate} --presets mine.toml --preset foretoken-tuned", monkeypatch) == 0
    assert "foretoken-tuned" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (f"{TUNE}", "give --trace FILE or --workload NAME"),
        (f"{TUNE} --trace train.csv --test train.csv", "its requests are those of the training"),
        (f"{TUNE} --trace train.csv --test again.csv.gz", "--test again: its requests are those"),
        (f"{TUNE} --trace train.csv,train.csv", "train.csv is named twice"),
        (f"{TUNE} --trace train.csv --workload d1", "give either --trace or --workload"),
        (f"{TUNE} --trace train.csv --rate 2", "give either --rate or --load"),
        (f"{TUNE} --trace train.csv --load 0", "--load 0: use factors above 0"),
        (f"{TUNE} --trace train.csv --preset fcfs,foretoken", "tune one preset at a time"),
        (f"{TUNE} --trace train.csv --objective speed", "unknown objective 'speed'"),
        (f"{TUNE} --trace train.csv --objective goodput", "counts met SLAs: give --sla"),
        (f"{TUNE} --trace train.csv --keys decay=9", "'decay=9' is not a range"),
        (f"{TUNE} --trace train.csv --trials 0", "'--trials'"),
        (f"{TUNE} --trace train.csv --json train.csv", "it is also an input"),
        (f"{TUNE} --trace train.csv --test other.csv --json other.csv", "it is also an input"),
    ],
)
def test_tune_refuses_in_one_sentence(
    words: str,
    sentence: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(words, monkeypatch) == 2
    reported = capsys.readouterr().err
    assert reported.count("\n") == 1 and reported.startswith("foretoken: ")
    assert sentence in reported


def test_capacity_is_the_rate_of_a_full_worker() -> None:
    """One request at a time, each 10 prompt tokens and one output token: 2 s. Nine of ten have
    ended after 18 s; the quantile lies a tenth of a request further."""
    one_slot = Hardware("hand", BY_HAND, kv_tokens=1_600, max_running=1)
    requests = workload([(0.0, 10, 1)] * 10)
    point = Point({}, settings("foretoken", one_slot, timing=INSTANT), requests)
    assert measure_capacity(point) == pytest.approx(9 / 18.2)
