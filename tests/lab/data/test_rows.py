"""Data files are parsed into rows and split by prompt; errors name the line."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.data.rows import DataError, Row, Source, parse_source, read_rows
from lab.data.split import is_validation, normalised, split

PLAIN = {"id": "a-0", "prompt": "Say hi", "model": "m", "task": "chat", "input_tokens": 2}
ROW = {**PLAIN, "output_tokens": 9}
HELD = "prompt 5"  # a validation row
KEPT = "prompt 0"  # a training row


def write(path: Path, *records: object) -> Path:
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def read(folder: Path, *records: object) -> list[Row]:
    return read_rows(Source(write(folder / "set.jsonl", *records)))


@pytest.mark.parametrize("name", ["talk.jsonl", "talk.jsonl.gz"])
def test_read_rows_parses_every_field(tmp_path: Path, name: str):
    [row] = read_rows(Source(write(tmp_path / name, {**ROW, "cap": 40, "ref_tokens": [9, 7, 0]})))
    assert row == Row("talk", "a-0", "Say hi", "m", "chat", 2, 9, cap=40, references=(7,))


def test_empty_answers_and_blank_lines_are_skipped(tmp_path: Path):
    path = write(tmp_path / "set.jsonl", ROW, {**ROW, "output_tokens": 0})
    path.write_text(path.read_text() + "\n\n")
    assert [row.output_tokens for row in read_rows(Source(path))] == [9]


def test_label_field_is_separate_model(tmp_path: Path):
    tokens = {"t0.0": 5, "t0.7": 6}
    path = write(tmp_path / "set.jsonl", {**ROW, "small": tokens}, ROW)
    [row] = read_rows(parse_source(f"{path}:small.t0.0"))
    assert (row.data, row.model) == ("set:small.t0.0", "small.t0.0")
    assert (row.output_tokens, row.references) == (5, (6,))


@pytest.mark.parametrize("field", ["small.t0.9", "large.t0.0", "model.name", "small"])
def test_missing_label_is_rejected(tmp_path: Path, field: str):
    path = write(tmp_path / "set.jsonl", {**ROW, "small": {"t0.0": 5}})
    with pytest.raises(DataError):
        read_rows(parse_source(f"{path}:{field}"))


def test_path_may_contain_colon(tmp_path: Path):
    path = write(tmp_path / "a:b.jsonl", ROW)
    assert parse_source(str(path)) == Source(path)
    assert parse_source("data/set.jsonl") == Source(Path("data/set.jsonl"))


def test_first_finished_sample_is_answer(tmp_path: Path):
    samples = [["k50", 400, 0], ["k50", 30, 1], ["greedy", 20], ["nucleus", 50, 1]]
    cut = {**PLAIN, "samples": [["k50", 400, 0]]}
    [row] = read(tmp_path, {**PLAIN, "samples": samples}, cut)
    assert (row.output_tokens, row.references) == (30, (20, 50))


def test_earlier_answers_are_included(tmp_path: Path):
    turns = [("c-1", 1, "m", 10), ("c-3", 3, "m", 30), ("c-2", 2, "m", 20), ("c-2", 2, "n", 99)]
    rows = read(
        tmp_path,
        *({**ROW, "id": i, "turn": t, "model": m, "output_tokens": n} for i, t, m, n in turns),
        {**ROW, "id": "d-2", "turn": 2},
        {**ROW, "id": "c-4"},
    )
    assert [row.answers for row in rows] == [(), (10, 20), (10,), (), (), ()]


def test_row_sample_is_deterministic(tmp_path: Path):
    path = write(tmp_path / "set.jsonl", *({**ROW, "id": f"a-{i}"} for i in range(50)))
    ids = [row.id for row in read_rows(Source(path), limit=10, seed=3)]
    assert ids == [row.id for row in read_rows(Source(path), limit=10, seed=3)]
    assert len(set(ids)) == 10
    assert ids == sorted(ids, key=lambda name: int(name[2:]))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "set.jsonl:2: not JSON"),
        ("[1]", "set.jsonl:2: a row must be a JSON object"),
        (json.dumps({**ROW, "prompt": None}), "set.jsonl:2: 'prompt' must be text"),
        (json.dumps({**ROW, "input_tokens": -1}), "set.jsonl:2: 'input_tokens' must be a number"),
        (json.dumps({**ROW, "output_tokens": 2.5}), "set.jsonl:2: 'output_tokens' must be"),
        (json.dumps({**ROW, "cap": True}), "set.jsonl:2: 'cap' must be a number"),
        (json.dumps({**ROW, "ref_tokens": 4}), "set.jsonl:2: 'ref_tokens' must be a list"),
        (json.dumps({**PLAIN, "samples": [4]}), "set.jsonl:2: 'samples' must be a list"),
        (json.dumps(PLAIN), "set.jsonl:2: neither 'output_tokens' nor 'samples'"),
    ],
)
def test_invalid_line_is_named(tmp_path: Path, line: str, message: str):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps(ROW) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        read_rows(Source(path))


def test_unreadable_files_are_reported(tmp_path: Path):
    (tmp_path / "plain.jsonl.gz").write_text("{}")
    whole = gzip.compress(json.dumps(ROW).encode() * 99)
    (tmp_path / "half.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "junk.jsonl").write_bytes(b"\xff\xfe\x00")
    for name in ("plain.jsonl.gz", "half.jsonl.gz", "junk.jsonl", "."):
        with pytest.raises(DataError, match="cannot be read"):
            read_rows(Source(tmp_path / name))
    with pytest.raises(DataError, match="does not exist"):
        read_rows(Source(tmp_path / "none.jsonl"))


def test_empty_file_is_rejected(tmp_path: Path):
    with pytest.raises(DataError, match=r"no row of .* has an answer's length"):
        read(tmp_path)


def row(data: str, prompt: str) -> Row:
    return Row(data, "x", prompt, "m", "chat", 1, 1)


def test_validation_rows_are_selected_by_hash():
    assert is_validation(HELD)
    assert not is_validation(KEPT)
    assert is_validation(f"  {HELD.upper()}\n")


def test_in_domain_split_holds_out_selected_prompts():
    a = Source(Path("a"))
    rows = [row("a", HELD), row("a", KEPT), row("a", HELD.upper())]
    parts = split({a: rows}, [a], [a])
    assert parts.train == [rows[1]]
    [judged] = parts.judged
    assert judged.in_domain
    assert judged.rows == [rows[0], rows[2]]


def test_out_of_domain_split_trains_on_other_sets():
    a, b = Source(Path("a")), Source(Path("b"))
    sets = {a: [row("a", KEPT), row("a", "other")], b: [row("b", f" {KEPT}"), row("b", HELD)]}
    parts = split(sets, [a], [b])
    assert [r.prompt for r in parts.train] == ["other"]
    assert not parts.judged[0].in_domain
    assert parts.judged[0].rows == sets[b]


def test_empty_split_is_rejected():
    a, b = Source(Path("a")), Source(Path("b"))
    with pytest.raises(DataError, match="none is a validation row"):
        split({a: [row("a", KEPT)]}, [a], [a])
    with pytest.raises(DataError, match="no rows of a remain to train on"):
        split({a: [row("a", KEPT)], b: [row("b", KEPT)]}, [a], [b])


@given(st.lists(st.sampled_from(["A", "a ", "b", "c", "D\n", "d", "e"]), min_size=1))
def test_split_shares_no_prompt(prompts: list[str]):
    a = Source(Path("a"))
    rows = [row("a", prompt) for prompt in prompts]
    try:
        parts = split({a: rows}, [a], [a])
    except DataError:
        return
    judged = parts.judged[0].rows
    assert not {normalised(r.prompt) for r in parts.train} & {normalised(r.prompt) for r in judged}
    assert len(parts.train) + len(judged) == len(rows)
