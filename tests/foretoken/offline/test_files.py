"""The files of an offline job: lines, resumption, and sentences about bad lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from foretoken.offline.files import AnswerFile, count_lines, read_requests
from foretoken.offline.job import OfflineRequest

BATCH_LINE = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}


def write(path: Path, *lines: object) -> Path:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def read(path: Path, answered: set[str]) -> tuple[list[OfflineRequest], list[str]]:
    faults: list[str] = []
    found = list(
        read_requests(
            path, answered, lambda line, error: faults.append(f"{line.name}: {error.message}")
        )
    )
    return found, faults


def test_lines_of_both_kinds_are_read(tmp_path: Path) -> None:
    chat: dict[str, Any] = {"messages": [], "custom_id": "c"}
    path = write(tmp_path / "in", BATCH_LINE, "", {"prompt": "y", "max_tokens": 2}, chat)
    found, faults = read(path, set())
    assert [(each.id, each.url) for each in found] == [
        ("a", "/v1/completions"), ("line-3", "/v1/completions"), ("c", "/v1/chat/completions"),
    ]  # fmt: skip
    assert found[1].fields == {"prompt": "y", "max_tokens": 2} and found[2].fields == {
        "messages": []
    }
    assert not faults and count_lines(path) == 3


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "the body is not valid JSON"),
        ("[1]", "the body must be a JSON object"),
        ({"max_tokens": 1}, "a line has one of prompt, messages and body"),
        ({"prompt": "a", "messages": []}, "a line has one of prompt, messages and body"),
        (BATCH_LINE | {"url": "/v1/images"}, "url: must be one of /v1/chat/completions, "),
        (BATCH_LINE | {"method": "GET"}, "method: must be POST"),
        (BATCH_LINE | {"body": 3}, "body: must be a JSON object"),
        (BATCH_LINE | {"custom_id": 3}, "custom_id: must be a text of 1 to 256 characters"),
    ],
)
def test_bad_line_is_one_sentence_with_its_number(tmp_path: Path, line: object, fault: str) -> None:
    found, faults = read(write(tmp_path / "in", BATCH_LINE, line), set())
    assert [each.id for each in found] == ["a"]
    [sentence] = faults
    assert sentence.startswith(f"line 2: {fault}")


def test_repeated_id_is_refused(tmp_path: Path) -> None:
    found, faults = read(write(tmp_path / "in", BATCH_LINE, BATCH_LINE), set())
    assert len(found) == 1 and faults == ["line 2: custom_id: 'a' occurs twice"]


def test_resumed_job_cuts_the_torn_line_and_skips_answered_ones(tmp_path: Path) -> None:
    out = write(tmp_path / "out", {"custom_id": "a", "response": {}}, {"custom_id": "line-2"})
    whole = out.read_bytes()
    out.write_bytes(whole + b'{"custom_id": "line-3", "resp')
    answers = AnswerFile(out)
    assert answers.answered == {"a", "line-2"} and out.read_bytes() == whole
    path = write(tmp_path / "in", BATCH_LINE, "torn", {"prompt": "y"})
    found, faults = read(path, answers.answered)
    assert [each.id for each in found] == ["line-3"] and not faults
    out.write_bytes(b'{"custom_id"')
    assert AnswerFile(out).answered == set() and out.read_bytes() == b""


@pytest.mark.parametrize("text", ["a list of things\n", "a list of things\n1. a", "things"])
def test_foreign_file_is_neither_continued_nor_changed(tmp_path: Path, text: str) -> None:
    out = tmp_path / "out"
    out.write_text(text)
    with pytest.raises(ValueError, match=r"line 1 of .* is no answer; name a new file"):
        AnswerFile(out)
    assert out.read_text() == text
