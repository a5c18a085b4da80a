"""A server that is killed within a batch answers each of its lines once."""

import json
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from tests.live import Live, serving, wait_for
from tests.system.children import kill_all

LINES = 60
ANSWERED = 15  # before the kill, at least
OPTIONS = ("--dtype=float32", "--set", "gateway.batch_idle_in_flight=2")
ENDED_S = 120.0


def line(number: int) -> dict[str, Any]:
    """Every third line is drawn, and one is refused."""
    message = {"role": "user", "content": f"Count from {number} to {number + 10}."}
    options = {"temperature": 1.0, "seed": number} if number % 3 == 0 else {"temperature": 0}
    body = {"messages": [message], "max_tokens": 60, **options}
    if number == 7:
        body["top_p"] = 2
    url = "/v1/chat/completions"
    return {"custom_id": f"line-{number}", "method": "POST", "url": url, "body": body}


def begin(live: Live) -> str:
    """The id of a new batch."""
    content = "\n".join(json.dumps(line(number)) for number in range(LINES))
    form: Any = {"files": {"file": ("lines.jsonl", content)}, "data": {"purpose": "batch"}}
    uploaded = httpx.post(f"{live.http}/v1/files", **form).json()
    batch = {"input_file_id": uploaded["id"], "endpoint": "/v1/chat/completions"}
    return str(httpx.post(f"{live.http}/v1/batches", json=batch).json()["id"])


def end(live: Live, batch_id: str) -> dict[str, Any]:
    """The batch once it has ended."""
    url = f"{live.http}/v1/batches/{batch_id}"
    wait_for(lambda: httpx.get(url).json()["status"] == "completed", ENDED_S)
    ended: dict[str, Any] = httpx.get(url).json()
    return ended


def read(live: Live, file_id: str) -> dict[str, Any]:
    """What each line was answered with. Each has one answer."""
    text = httpx.get(f"{live.http}/v1/files/{file_id}/content").text
    rows = [json.loads(row) for row in text.splitlines()]
    found = {row["custom_id"]: row["response"] for row in rows}
    assert len(found) == len(rows), "a line is answered twice"
    return found


def contents(answers: dict[str, Any]) -> dict[str, str]:
    return {
        name: answer["body"]["choices"][0]["message"]["content"] for name, answer in answers.items()
    }


@pytest.mark.slow
def test_killed_server_answers_each_line_of_its_batch_once(tmp_path: Path) -> None:
    chosen = (*OPTIONS, f"--batch-folder={tmp_path}")
    with serving(*chosen) as live:
        batch_id = begin(live)
        output = tmp_path / "batches" / batch_id / "output"
        wait_for(lambda: output.exists() and output.read_bytes().count(b"\n") >= ANSWERED, ENDED_S)
        kill_all(live)
    early = output.read_bytes().splitlines()[:ANSWERED]
    assert output.read_bytes().count(b"\n") < LINES - 1, "the kill came within the batch"
    with serving(*chosen) as live:
        batch = end(live, batch_id)
        counts = {"total": LINES, "completed": LINES - 1, "failed": 1}
        assert batch["request_counts"] == counts
        answers = read(live, batch["output_file_id"])
        assert answers.keys() == {f"line-{n}" for n in range(LINES) if n != 7}
        for row in map(json.loads, early):
            assert answers[row["custom_id"]] == row["response"], "what was answered stays"
        refused = read(live, batch["error_file_id"])
        assert refused.keys() == {"line-7"} and refused["line-7"]["status_code"] == 400
        undisturbed = end(live, begin(live))
        assert contents(read(live, undisturbed["output_file_id"])) == contents(answers)
