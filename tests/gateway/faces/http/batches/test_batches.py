"""`/v1/files` and `/v1/batches` by the official client, on a gateway between fakes."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from gateway.faces.http.batches.runner import LAST_PRIORITY, run_batches
from services.runtime.tasks import background
from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of
from tests.gateway.gateway_fixtures import STOP

CHAT: Any = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


def chat_line(custom_id: str, **body: Any) -> dict[str, Any]:
    message = {"role": "user", "content": custom_id}
    body = {"messages": [message], **body}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@asynccontextmanager
async def serving_batches(
    folder: Path, script: Callable[..., Any] | None = lambda _: tokens_of("fine"), **config: Any
) -> AsyncIterator[Harness]:
    async with (
        run_harness(script, batch_folder=str(folder), **config) as harness,
        background(run_batches(harness.front)),
    ):
        yield harness


@pytest.fixture
async def harness(tmp_path: Path) -> AsyncIterator[Harness]:
    async with serving_batches(tmp_path) as made:
        yield made


def client_of(harness: Harness, key: str = "none") -> AsyncOpenAI:
    client = AsyncOpenAI(base_url=f"{harness.http_url}/v1", api_key=key, max_retries=0)
    harness.stack.push_async_callback(client.close)
    return client


async def upload(client: AsyncOpenAI, content: bytes) -> str:
    return (await client.files.create(file=("in.jsonl", content), purpose="batch")).id


async def begin(client: AsyncOpenAI, content: bytes) -> Any:
    return await client.batches.create(
        input_file_id=await upload(client, content), endpoint=CHAT, completion_window="24h",
        metadata={"job": "test"},
    )  # fmt: skip


async def ended(client: AsyncOpenAI, batch_id: str) -> Any:
    async with asyncio.timeout(30):
        batch: Any = await client.batches.retrieve(batch_id)
        while batch.status not in ENDED:
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch_id)
    return batch


async def lines_of(client: AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id
    text = (await client.files.content(file_id)).text
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row for row in rows}


async def test_batch_answers_each_line_or_says_why_not(harness: Harness) -> None:
    client = client_of(harness)
    lines = [chat_line("a"), chat_line("b", n=2), chat_line("hot", temperature=9)]
    batch = await begin(client, jsonl(*lines, chat_line("s", stream=True)))
    assert (batch.status, batch.metadata) == ("validating", {"job": "test"})
    batch = await ended(client, batch.id)
    assert batch.status == "completed" and batch.completed_at >= batch.in_progress_at
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (4, 2, 2)
    answers, faults = [
        await lines_of(client, each) for each in (batch.output_file_id, batch.error_file_id)
    ]
    assert answers.keys() == {"a", "b"} and faults.keys() == {"hot", "s"}
    body = answers["b"]["response"]["body"]
    assert [each["message"]["content"] for each in body["choices"]] == ["fine", "fine"]
    assert body["object"] == "chat.completion" and body["usage"]["completion_tokens"] > 0
    refused = faults["hot"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"]["error"]["param"] == "temperature"
    assert {each.priority for each in harness.scheduler.requests} == {LAST_PRIORITY}
    assert {each.sla.name for each in harness.scheduler.requests} == {"batch"}
    assert [each.id for each in (await client.batches.list()).data] == [batch.id]


async def test_files_are_listed_read_and_deleted(harness: Harness) -> None:
    client = client_of(harness)
    content = jsonl(chat_line("a"))
    first, second = await upload(client, content), await upload(client, content)
    found = await client.files.retrieve(first)
    assert (found.bytes, found.filename, found.purpose) == (len(content), "in.jsonl", "batch")
    assert (await client.files.content(first)).content == content
    listed = [each.id async for each in client.files.list(limit=1)]
    assert set(listed) == {first, second}
    assert [each.id async for each in client.files.list(order="asc")] == listed[::-1]
    assert (await client.files.delete(first)).deleted
    for gone in (first, "file-..", "nothing"):
        with pytest.raises(openai.NotFoundError, match="No such File"):
            await client.files.retrieve(gone)


async def test_bad_lines_fail_the_batch_with_their_numbers(harness: Harness) -> None:
    client = client_of(harness)
    other = {**chat_line("c"), "url": "/v1/completions"}
    listed = {**chat_line("d"), "url": [CHAT]}
    content = jsonl(chat_line("a"), chat_line("a"), other, listed) + b"{torn\n"
    batch = await ended(client, (await begin(client, content)).id)
    assert batch.status == "failed" and batch.output_file_id is None
    found = [(each.line, each.param) for each in batch.errors.data]
    assert found == [(2, "custom_id"), (3, "url"), (4, "url"), (5, None)]
    assert not harness.scheduler.requests


async def test_keys_see_their_own_files_and_batches_only(tmp_path: Path) -> None:
    async with serving_batches(tmp_path, api_keys=("ft-one-key-abc", "ft-two-key-abc")) as harness:
        one, two = client_of(harness, "ft-one-key-abc"), client_of(harness, "ft-two-key-abc")
        batch = await begin(one, jsonl(chat_line("a")))
        assert (await ended(one, batch.id)).status == "completed"
        assert not (await two.batches.list()).data and not (await two.files.list()).data
        with pytest.raises(openai.NotFoundError):
            await two.batches.cancel(batch.id)
        with pytest.raises(openai.BadRequestError, match="input_file_id: No such File"):
            await two.batches.create(
                input_file_id=batch.input_file_id, endpoint=CHAT, completion_window="24h"
            )
        assert harness.scheduler.requests[0].tenant.startswith("key-")


async def test_cancelled_batch_keeps_its_answers(tmp_path: Path) -> None:
    """The worker answers the first line only."""
    async with serving_batches(tmp_path, None, batch_in_flight=1) as harness:
        client = client_of(harness)
        batch = await begin(client, jsonl(*(chat_line(name) for name in "abc")))
        await harness.until(lambda: len(harness.worker.prompts) == 1)
        harness.worker.send(harness.worker.prompts[0].request_id, 0, tokens_of("yes"), STOP)
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        assert (await client.batches.cancel(batch.id)).status == "cancelling"
        batch = await ended(client, batch.id)
        assert batch.status == "cancelled" and batch.cancelling_at
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 2)
        assert (await lines_of(client, batch.output_file_id)).keys() == {"a"}
        left = await lines_of(client, batch.error_file_id)
        assert {each["error"]["code"] for each in left.values()} == {"batch_cancelled"}
        await harness.until(lambda: len(harness.scheduler.cancels) == 1)
        with pytest.raises(openai.BadRequestError, match="the batch has ended"):
            await client.batches.cancel(batch.id)


async def test_client_request_ends_what_only_an_idle_server_runs(tmp_path: Path) -> None:
    """The worker answers nothing until the client's request has arrived."""
    limits = {"batch_in_flight": 1, "batch_idle_in_flight": 3, "batch_quiet_s": 0.2}
    async with serving_batches(tmp_path, None, **limits) as harness:
        client = client_of(harness)
        batch = await begin(client, jsonl(*(chat_line(name) for name in "abcd")))
        await harness.until(lambda: len(harness.worker.prompts) == 3)
        asked = asyncio.ensure_future(
            harness.http("POST", "/v1/completions", {"prompt": "online", "max_tokens": 2})
        )
        await harness.until(lambda: len(harness.scheduler.cancels) == 2)
        first, *ended_early, online = harness.worker.prompts
        assert {each.request_id for each in harness.scheduler.cancels} == {
            each.request_id for each in ended_early
        }
        harness.worker.script = lambda _: tokens_of("fine")
        harness.worker.send(online.request_id, 0, tokens_of("x"), STOP)
        assert (await asked).status == 200
        harness.worker.send(first.request_id, 0, tokens_of("yes"), STOP)
        batch = await ended(client, batch.id)
        assert batch.request_counts.completed == 4


async def test_restarted_server_answers_only_what_is_left(tmp_path: Path) -> None:
    async with serving_batches(tmp_path, None, batch_in_flight=1) as harness:
        batch = await begin(client_of(harness), jsonl(*(chat_line(name) for name in "abc")))
        await harness.until(lambda: len(harness.worker.prompts) == 1)
        harness.worker.send(harness.worker.prompts[0].request_id, 0, tokens_of("yes"), STOP)
        await harness.until(lambda: len(harness.worker.prompts) == 2)
    with (tmp_path / "batches" / batch.id / "output").open("ab") as output:
        output.write(b'{"id": "batch_req_1", "custom_id": "b", "resp')  # the process was killed
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        batch = await ended(client, batch.id)
        assert batch.status == "completed" and batch.request_counts.completed == 3
        answers = await lines_of(client, batch.output_file_id)
        contents = [
            answers[name]["response"]["body"]["choices"][0]["message"]["content"] for name in "abc"
        ]
        assert contents == ["yes", "fine", "fine"] and len(harness.worker.prompts) == 2


async def test_expired_batch_says_which_lines_are_unanswered(tmp_path: Path) -> None:
    async with serving_batches(tmp_path, None) as harness:
        client = client_of(harness)
        batch = await begin(client, jsonl(chat_line("a")))
        await harness.until(lambda: len(harness.worker.prompts) == 1)
    record = tmp_path / "batches" / batch.id / "batch.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "expires_at": 1}))
    async with serving_batches(tmp_path) as harness:
        client = client_of(harness)
        batch = await ended(client, batch.id)
        assert batch.status == "expired" and batch.request_counts.failed == 1
        lines = await lines_of(client, batch.error_file_id)
        assert lines["a"]["error"]["code"] == "batch_expired" and not harness.worker.prompts


@pytest.mark.slow
async def test_one_process_runs_the_batches_of_a_folder(tmp_path: Path) -> None:
    async with serving_batches(tmp_path) as one, serving_batches(tmp_path) as two:
        client = client_of(two)
        for _ in range(2):
            batch = await ended(client, (await begin(client, jsonl(chat_line("a")))).id)
            assert batch.status == "completed"
        assert len(one.worker.prompts) + len(two.worker.prompts) == 2


async def test_mistakes_are_named(tmp_path: Path) -> None:
    async with serving_batches(tmp_path, batch_file_bytes=1000, batch_files=4) as harness:
        client = client_of(harness)
        file_id = await upload(client, jsonl(chat_line("a")))
        for given, fault in (
            ({"endpoint": "/v1/images"}, "endpoint: must be one of /v1/chat/completions"),
            ({"completion_window": "1h"}, "completion_window: must be 24h"),
            ({"input_file_id": "file-x"}, "input_file_id: No such File object: file-x"),
            ({"metadata": {"a": "b" * 600}}, "metadata: at most 64 characters"),
            ({"output_expires_after": {}}, "output_expires_after: is not supported"),
            ({"input_file_id": 5}, "input_file_id: input should be a valid string"),
        ):
            valid = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "24h"}
            reply = await harness.http("POST", "/v1/batches", valid | given)
            assert reply.status == 400 and fault in reply.json["error"]["message"]
        with pytest.raises(openai.APIStatusError) as large:
            await upload(client, b"x" * 100_000)
        assert large.value.status_code == 413
        with pytest.raises(openai.BadRequestError, match="file: is empty"):
            await upload(client, b"")
        with pytest.raises(openai.BadRequestError, match="purpose: must be batch"):
            await client.files.create(file=("a", b"x"), purpose="assistants")
        with pytest.raises(openai.BadRequestError, match="expires_after: is not supported"):
            await client.files.create(
                file=("a", b"x"), purpose="batch",
                expires_after={"anchor": "created_at", "seconds": 3600},
            )  # fmt: skip
        reply = await harness.http("POST", "/v1/files", {"file": "x"})
        assert reply.status == 400
        assert reply.json["error"]["message"].startswith("send the file as multipart/form-data")
        reply = await harness.http("GET", "/v1/files?limit=x")
        assert reply.json["error"]["param"] == "limit"


async def test_without_a_folder_there_are_no_batches() -> None:
    async with run_harness() as harness:
        for method, path in (("GET", "/v1/files"), ("POST", "/v1/batches")):
            reply = await harness.http(method, path, {} if method == "POST" else None)
            assert reply.status == 404
            assert "start the server with --batch-folder" in reply.json["error"]["message"]
