"""`foretoken evaluate` from the command line, on small data sets."""

import json
import random
import subprocess
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path

import pytest
import typer
from rich.text import Text

from foretoken.commands.offline.evaluate import evaluate
from foretoken.commands.usage import ManyCommand, repeat_options
from lab.evaluation.report import COLUMNS, JsonRow, read_json, tables, write_json
from services.core import LiveAnswers
from services.forecast import Forecast, certain
from services.predictor.interface import Example, Query
from services.predictor.predictors import PREDICTORS
from tests.live import ROOT, command, environment

METRICS = {"tau", "rmse", "mae", "pinball", "coverage_50", "coverage_90"}
TIMED = {"ms_batch1", "ms_cached", "ms_batch64"}


def data_set(path: Path, rows: int, longest: int, model: str = "m") -> Path:
    """Rows of two applications; answers of one are half as long as those of the other."""
    rng = random.Random(path.name)
    records = [
        {
            "id": f"{path.stem}-{i}",
            "prompt": f"{('Tell', 'Translate')[i % 2]} me about {path.stem} number {i}",
            "model": model,
            "task": ("chat/all", "mt/de-en")[i % 2],
            "input_tokens": 7,
            "output_tokens": rng.randint(1, longest // (1 + i % 2)),
        }
        for i in range(rows)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("evaluate", *map(str, arguments)),
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
        cwd=ROOT,
    )


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return data_set(tmp_path / "near.jsonl", 400, 100)


@pytest.fixture
def far(tmp_path: Path) -> Path:
    return data_set(tmp_path / "far.jsonl", 600, 300, "n")


PROMPTLESS = ("--predictor", "history", "max", "oracle")


@pytest.mark.slow
def test_evaluate_reports_two_sets(near: Path, far: Path, tmp_path: Path):
    out = tmp_path / "report.json"
    done = run("--train", near, "--data", near, far, *PROMPTLESS, "--json", out, "--online", "200")
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    names = [(row["data"], row["predictor"]) for row in rows]
    assert sorted(names) == sorted((d, p) for d in ("near", "far") for p in PROMPTLESS[1:])
    assert out.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    found = dict(zip(names, rows, strict=True))
    for row in rows:
        assert row.keys() >= METRICS | TIMED | {"n", "n_train"}
    history, most, oracle = (found["near", name] for name in PROMPTLESS[1:])
    assert history["n"] + history["n_train"] == 400
    assert found["far", "max"]["n"] == 600
    assert history["tau"] > 0.2  # the applications differ
    assert most["tau"] is None  # one length for all has no order
    assert oracle["tau"] == pytest.approx(1)
    assert oracle["pinball"] == 0 < history["pinball"] < most["pinball"]
    assert 0.8 < history["coverage_90"] <= 1
    assert all(history[key] > 0 for key in TIMED)
    assert all(oracle[key] is None for key in TIMED)
    transferred = found["far", "history"]
    assert (history["in_domain"], transferred["in_domain"]) == (True, False)
    assert transferred["online_outcomes"] == 200
    assert transferred["pinball_online"] < transferred["pinball"]
    for text in ("near", "far", "history", "oracle", "trained", "200 outcomes"):
        assert text in done.stdout


@pytest.mark.slow
def test_evaluate_compares_with_earlier_report(near: Path, far: Path, tmp_path: Path):
    early, late = tmp_path / "early.json", tmp_path / "late.json"
    only = ("--predictor", "history")
    assert run("--train", far, "--data", far, *only, "--json", early).returncode == 0
    done = run("--train", near, "--data", far, *only, "--json", late, "--beside", early)
    assert done.returncode == 0, done.stderr
    [before], [after] = json.loads(early.read_text()), json.loads(late.read_text())
    assert after["tau_in_domain"] == before["tau"]
    assert "of its in-domain tau" in done.stdout
    assert after["n_online"] == before["n"]


@pytest.mark.slow
def test_evaluate_is_deterministic_by_seed(near: Path, far: Path, tmp_path: Path):
    runs = []
    for name in ("a.json", "b.json"):
        out = tmp_path / name
        run(
            "--train",
            near,
            "--data",
            far,
            *PROMPTLESS,
            "--json",
            out,
            "--rows",
            "300",
            "--seed",
            "5",
        )
        rows = json.loads(out.read_text())
        runs.append([{k: v for k, v in row.items() if k not in TIMED} for row in rows])
    assert runs[0] == runs[1]
    assert runs[0][0]["n"] == 300


@pytest.mark.slow
def test_unknown_predictor_lists_known_ones(near: Path):
    done = run("--train", near, "--data", near, "--predictor", "history", "histroy")
    assert (done.returncode, done.stdout) == (2, "")
    [message] = done.stderr.strip().splitlines()
    assert message.startswith("foretoken: unknown predictor 'histroy'; known: ")
    assert {"history", "max", "oracle"} <= set(message.partition("known: ")[2].split(", "))


def run_in_process(*arguments: str | Path) -> None:
    app = typer.Typer()
    app.command(cls=ManyCommand)(evaluate)
    app([*map(str, arguments)], standalone_mode=False)


def error_message(*arguments: str | Path) -> str:
    """Return the message of the error that the command raises."""
    with pytest.raises(ValueError) as caught:
        run_in_process(*arguments, "--predictor", "history")
    return str(caught.value)


def test_missing_broken_or_empty_file_is_reported(near: Path, tmp_path: Path):
    none = tmp_path / "none.jsonl"
    empty = data_set(tmp_path / "empty.jsonl", 0, 10)
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("no json\n")
    assert error_message("--train", near, "--data", none) == f"the file {none} does not exist"
    assert "has an answer's length" in error_message("--train", empty, "--data", near)
    assert error_message("--train", wrong, "--data", near).startswith(f"{wrong}:1: not JSON")
    assert "has the field 'other'" in error_message("--train", f"{near}:other", "--data", near)
    assert "not a report of an earlier run" in error_message(
        "--train", near, "--data", near, "--beside", wrong
    )


def test_equal_file_names_and_unwritable_output_are_rejected(near: Path, tmp_path: Path):
    (tmp_path / "twin").mkdir()
    same = data_set(tmp_path / "twin" / "near.jsonl", 9, 9)
    assert "same name" in error_message("--train", near, "--data", same)
    nowhere = tmp_path / "no" / "report.json"
    assert "does not exist; create it" in error_message(
        "--train", near, "--data", near, "--json", nowhere
    )


def test_empty_split_is_reported(near: Path, tmp_path: Path):
    copy = tmp_path / "copy.jsonl"
    copy.write_text(near.read_text())
    assert "remain to train on" in error_message("--train", near, "--data", copy)
    record = {**json.loads(near.read_text().splitlines()[0]), "prompt": "prompt 0"}
    one = tmp_path / "one.jsonl"
    one.write_text(json.dumps(record))
    assert "remain to evaluate" in error_message("--train", one, "--data", one)


def test_help_names_the_options():
    done = run("--help")
    assert done.returncode == 0
    for option in ("--train", "--data", "--predictor", "--json", "--plot", "--online"):
        assert option in done.stdout


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--train a b --data c", "--train a --train b --data c"),
        ("--train a --train b", "--train a --train b"),
        ("--train=a b --seed 1", "--train=a --train b --seed 1"),
        ("--seed 1 2", "--seed 1 2"),
        ("--data a --no-ladder b", "--data a --no-ladder b"),
    ],
)
def test_option_accepts_many_values(typed: str, meant: str):
    assert repeat_options(typed.split()) == meant.split()


def test_best_value_is_bold_except_oracle():
    shown: JsonRow = {"data": "set", "in_domain": True, "n": 9, "n_train": 8, "ladder": {}}
    shown |= dict.fromkeys([*COLUMNS, "tau_draws", "online_outcomes", "tau_in_domain"])
    [table] = tables(
        [
            {**shown, "predictor": "history", "tau": 0.25, "coverage_50": 0.5},
            {**shown, "predictor": "forest", "tau": 0.5, "coverage_50": 0.4},
            {**shown, "predictor": "max", "tau": nan, "coverage_50": 0.0},
            {**shown, "predictor": "oracle", "tau": 1.0, "coverage_50": 1.0},
        ]
    )
    assert [column.header for column in table.columns] == ["predictor", "tau", "in 50%"]
    taus = [cell for cell in table.columns[1].cells if isinstance(cell, Text)]
    assert [cell.plain for cell in taus] == ["0.250", "0.500", "–", "1.000"]
    assert [cell.style for cell in taus] == ["", "bold", "", ""]


def test_nan_becomes_null_in_json(tmp_path: Path):
    path = tmp_path / "report.json"
    write_json(path, [{"tau": nan, "reached": [0.5, inf], "ladder": {"UILO": nan}}])
    assert read_json(path) == [{"tau": None, "reached": [0.5, None], "ladder": {"UILO": None}}]


class PromptLengthPredictor:
    """Forecasts the last output length of a prompt with as many characters."""

    version = 0

    def __init__(self) -> None:
        self._lengths: dict[float, int] = {}

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        return [certain(self._lengths.get(self._chars(query), 1)) for query in batch]

    def learn(self, examples: Sequence[Example]) -> int:
        self._lengths |= {self._chars(e.query): e.output_tokens for e in examples}
        return len(examples)

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Does nothing."""

    def _chars(self, query: Query) -> float:
        assert query.features is not None
        return float(query.features.numbers[0])


@pytest.mark.slow
def test_prompt_predictor_receives_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setitem(PREDICTORS, "reader", lambda _: PromptLengthPredictor())
    path = tmp_path / "lines.jsonl"
    records = [
        {
            "id": f"a-{i}",
            "prompt": f"Say it again:\n{'x' * (i % 5 + 1)} {i:03}",
            "model": "m",
            "task": "say/again",
            "input_tokens": 9,
            "output_tokens": 10 * (i % 5 + 1),
        }
        for i in range(120)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    out, cache = tmp_path / "report.json", tmp_path / "cache"
    typed: list[str | Path] = ["--train", path, "--data", path, "--json", out, "--cache", cache]
    names = ["--predictor", "reader", "history"]
    run_in_process(*typed, *names)
    reader, history = read_json(out)
    assert (reader["tau"], reader["rmse"]) == (pytest.approx(1), 0)
    assert history["tau"] is None
    assert isinstance(reader["ladder"], dict)
    assert list(reader["ladder"]) == ["UILO", "RAFT", "INST", "USIN"]
    assert reader["ladder"] == history["ladder"]
    assert "Magnus' ladder" in capsys.readouterr().out
    [kept] = cache.iterdir()
    written = kept.stat().st_mtime_ns
    run_in_process(*typed, *names, "--no-ladder")
    again, _ = read_json(out)
    assert (again["rmse"], again["ladder"]) == (0, {})
    assert kept.stat().st_mtime_ns == written
