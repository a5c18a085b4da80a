"""Batches with a folder, input or process that fails: a state or a sentence, no answer twice."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.faces.http.batches.progress import AnswerLines
from gateway.faces.http.batches.store import PART_S, BatchStore
from tests.gateway.faces.http.batches.test_batches import (
    begin,
    chat_line,
    client_of,
    ended,
    jsonl,
    lines_of,
    serving_batches,
    upload,
)
from tests.gateway.gateway_fakes import Harness, tokens_of
from tests.gateway.gateway_fixtures import STOP

LINES = jsonl(*(chat_line(name) for name in "abc"))


async def answer_first(harness: Harness) -> Any:
    """A batch of three lines, of which the first is answered and the second one runs."""
    batch = await begin(client_of(harness), LINES)
    await harness.until(lambda: len(harness.worker.prompts) == 1)
    harness.worker.send(harness.worker.prompts[0].request_id, 0, tokens_of("yes"), STOP)
    await harness.until(lambda: len(harness.worker.prompts) == 2)
    return batch


def serving_slowly(folder: Path) -> Any:
    return serving_batches(folder, None, batch_in_flight=1)


async def test_deleted_input_does_not_stop_a_batch_that_runs(tmp_path: Path) -> None:
    async with serving_slowly(tmp_path) as harness:
        client = client_of(harness)
        batch = await answer_first(harness)
        await client.files.delete(batch.input_file_id)
        harness.worker.script = lambda _: tokens_of("fine")
        harness.worker.send(harness.worker.prompts[1].request_id, 0, tokens_of("yes"), STOP)
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 3)


async def test_batch_without_its_input_fails_with_the_answers_so_far(tmp_path: Path) -> None:
    async with serving_slowly(tmp_path) as harness:
        batch = await answer_first(harness)
        await client_of(harness).files.delete(batch.input_file_id)
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        batch = await ended(client, batch.id)
        assert (batch.status, batch.request_counts.completed) == ("failed", 1)
        (fault,) = batch.errors.data
        assert (fault.code, fault.message.split(":")[0]) == (
            "missing_file", "the input file cannot be read",
        )  # fmt: skip
        assert (await lines_of(client, batch.output_file_id)).keys() == {"a"}


async def test_cancelled_batch_without_its_input_keeps_its_answers(tmp_path: Path) -> None:
    async with serving_slowly(tmp_path) as harness:
        client = client_of(harness)
        batch = await answer_first(harness)
        await client.files.delete(batch.input_file_id)
        await client.batches.cancel(batch.id)
        batch = await ended(client, batch.id)
        assert (batch.status, batch.error_file_id) == ("cancelled", None)
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)


async def test_batch_cancelled_before_a_restart_ends_after_it(tmp_path: Path) -> None:
    async with serving_slowly(tmp_path) as harness:
        batch = await answer_first(harness)
    (tmp_path / "batches" / batch.id / "cancel").touch()  # the process ended before it saw this
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and not harness.worker.prompts
        assert (await lines_of(client, batch.error_file_id)).keys() == {"b", "c"}


@pytest.mark.parametrize("moved", [False, True])
async def test_process_killed_between_answers_and_files_makes_each_file_once(
    tmp_path: Path, moved: bool
) -> None:
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        batch = await ended(client, (await begin(client, LINES)).id)
    files, folder = tmp_path / "files", tmp_path / "batches" / batch.id
    record = json.loads((folder / "batch.json").read_text())
    (folder / "batch.json").write_text(json.dumps({**record, "status": "finalizing"}))
    (files / f"{batch.output_file_id}.json").unlink()
    if not moved:
        (files / f"{batch.output_file_id}.data").rename(folder / "output")
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        again = await ended(client, batch.id)
        assert (again.status, again.output_file_id) == ("completed", batch.output_file_id)
        assert (await lines_of(client, again.output_file_id)).keys() == set("abc")
        listed = [each.purpose async for each in client.files.list()]
        assert sorted(listed) == ["batch", "batch_output"] and not harness.worker.prompts


async def test_full_disk_fails_the_batch_with_the_answers_so_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add, written = AnswerLines.add, 0

    def add_until_full(lines: AnswerLines, custom_id: str, line: bytes) -> None:
        nonlocal written
        written += 1
        if written > 1:
            add(lines, custom_id, line[:20])  # what the disk has room for
            raise OSError(28, "No space left on device")
        add(lines, custom_id, line)

    monkeypatch.setattr(AnswerLines, "add", add_until_full)
    async with serving_batches(tmp_path, batch_in_flight=1) as harness:
        client = client_of(harness)
        batch = await ended(client, (await begin(client, LINES)).id)
        assert (batch.status, batch.request_counts.completed) == ("failed", 1)
        (fault,) = batch.errors.data
        assert fault.message == "answers cannot be stored: No space left on device"
        assert (await lines_of(client, batch.output_file_id)).keys() == {"a"}
        monkeypatch.undo()
        assert (await ended(client, (await begin(client, LINES)).id)).status == "completed"


async def test_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        file_id = await upload(client, LINES)
        for name in ("files", "batches"):
            shutil.rmtree(tmp_path / name)
            (tmp_path / name).touch()  # root may write to a folder without permissions
        with pytest.raises(openai.APIStatusError, match="cannot be stored now: Not a dir") as full:
            await upload(client, LINES)
        assert full.value.status_code == 503
        with pytest.raises(openai.APIStatusError, match="files and batches cannot be stored now"):
            await client.batches.list()
        with pytest.raises(openai.NotFoundError):
            await client.files.content(file_id)
        for name in ("files", "batches"):
            (tmp_path / name).unlink()
            (tmp_path / name).mkdir()
        assert (await client.batches.list()).data == []


@pytest.mark.slow
async def test_foreign_record_is_not_listed(tmp_path: Path) -> None:
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        folder = tmp_path / "batches" / f"batch_{'0' * 24}"
        folder.mkdir()
        for text in ("[]", '{"id": 1}', "{torn", "null"):
            (folder / "batch.json").write_text(text)
            batch = await ended(client, (await begin(client, LINES)).id)
            assert batch.status == "completed"
        assert len((await client.batches.list()).data) == 4


def test_lines_behind_a_torn_one_are_answered_again(tmp_path: Path) -> None:
    path = tmp_path / "output"
    whole = b'{"custom_id": "a"}\n{"custom_id": "b"}\n'
    for torn in (b'{"custom_id": "c"', b'\0\0\0\n{"custom_id": "c"}\n', b"[]\n", b""):
        path.write_bytes(whole + torn)
        lines = AnswerLines(path)
        assert lines.answered == {"a", "b"}
        lines.add("c", b'{"custom_id": "c"}\n')
        lines.close()
        assert path.read_bytes() == whole + b'{"custom_id": "c"}\n'


def test_files_that_a_killed_process_has_begun_are_removed(tmp_path: Path) -> None:
    store = BatchStore(str(tmp_path))
    old, new = tmp_path / "files" / "file-a.0.part", tmp_path / "files" / "file-b.1.part"
    for path in (old, new):
        path.touch()
    begun, fresh = [tmp_path / "batches" / f"batch_{digit * 24}" for digit in "01"]
    foreign = tmp_path / "batches" / "other"
    for folder in (begun, fresh, foreign):
        folder.mkdir()
    past_s = time.time() - 2 * PART_S
    for path in (old, begun, foreign):
        os.utime(path, (past_s, past_s))
    store.remove_parts()
    assert [*(tmp_path / "files").iterdir()] == [new], "another process may still write it"
    assert {*(tmp_path / "batches").iterdir()} == {fresh, foreign}
