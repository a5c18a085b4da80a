"""`/v1/messages/batches` on a gateway between fakes."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gateway.faces.http.batches.runner import LAST_PRIORITY
from tests.gateway.faces.http.batches.test_batches import serving_batches
from tests.gateway.gateway_fakes import Harness, tokens_of
from tests.gateway.gateway_fixtures import STOP

BATCHES = "/v1/messages/batches"


def asked(custom_id: str, **params: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": custom_id}]
    return {"custom_id": custom_id, "params": {"max_tokens": 8, "messages": messages, **params}}


async def begin(harness: Harness, *requests: dict[str, Any]) -> dict[str, Any]:
    reply = await harness.http("POST", BATCHES, {"requests": requests})
    assert reply.status == 200, reply.text
    batch: dict[str, Any] = reply.json
    assert (batch["type"], batch["processing_status"]) == ("message_batch", "in_progress")
    assert batch["request_counts"]["processing"] == len(requests)
    assert batch["results_url"] is batch["ended_at"] is batch["cancel_initiated_at"] is None
    return batch


async def ended(harness: Harness, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(30):
        while True:
            batch: dict[str, Any] = (await harness.http("GET", f"{BATCHES}/{batch_id}")).json
            if batch["processing_status"] == "ended":
                return batch
            await asyncio.sleep(0.05)


async def results(harness: Harness, batch: dict[str, Any]) -> dict[str, Any]:
    text = (await harness.http("GET", batch["results_url"])).text
    rows = [json.loads(line) for line in text.splitlines()]
    assert len({row["custom_id"] for row in rows}) == len(rows)
    return {row["custom_id"]: row["result"] for row in rows}


def counts(**given: int) -> dict[str, int]:
    none = dict.fromkeys(("processing", "succeeded", "errored", "canceled", "expired"), 0)
    return none | given


async def test_message_batch_answers_each_request_or_says_why_not(tmp_path: Path) -> None:
    async with serving_batches(tmp_path) as harness:
        many = asked("a", system="Be brief."), asked("hot", temperature=9), asked("s", stream=True)
        batch = await ended(harness, (await begin(harness, *many))["id"])
        assert batch["request_counts"] == counts(succeeded=1, errored=2)
        assert batch["created_at"] <= batch["ended_at"] < batch["expires_at"]
        found = await results(harness, batch)
        message = found["a"]["message"]
        assert (found["a"]["type"], message["content"]) == (
            "succeeded", [{"type": "text", "text": "fine"}]
        )  # fmt: skip
        assert message["usage"]["output_tokens"] > 0
        for name, fault in (("hot", "temperature: "), ("s", "stream: ")):
            error = found[name]["error"]
            assert (found[name]["type"], error["type"]) == ("errored", "error")
            assert error["error"]["type"] == "invalid_request_error"
            assert error["error"]["message"].startswith(fault) and error["request_id"]
        assert {each.priority for each in harness.scheduler.requests} == {LAST_PRIORITY}
        for path in ("/v1/batches", "/v1/files"):  # OpenAI's lists have nothing of it
            assert (await harness.http("GET", path)).json["data"] == []
        assert (await harness.http("GET", f"/v1/batches/{batch['id'][3:]}")).status == 404
        gone = await harness.http("DELETE", f"{BATCHES}/{batch['id']}")
        assert gone.json == {"id": batch["id"], "type": "message_batch_deleted"}
        assert not list((tmp_path / "batches").iterdir())


async def test_cancelled_message_batch_keeps_its_answers(tmp_path: Path) -> None:
    """The worker answers the first request only."""
    async with serving_batches(tmp_path, None, batch_in_flight=1) as harness:
        batch = await begin(harness, *map(asked, "abc"))
        await harness.until(lambda: len(harness.worker.prompts) == 1)
        harness.worker.send(harness.worker.prompts[0].request_id, 0, tokens_of("yes"), STOP)
        await harness.until(lambda: len(harness.worker.prompts) == 2)
        path = f"{BATCHES}/{batch['id']}"
        for method, early in (("GET", f"{path}/results"), ("DELETE", path)):
            reply = await harness.http(method, early)
            assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
            assert "the batch has not ended" in reply.json["error"]["message"]
        cancelling = (await harness.http("POST", f"{path}/cancel")).json
        assert cancelling["processing_status"] == "canceling" and cancelling["cancel_initiated_at"]
        batch = await ended(harness, batch["id"])
        assert batch["request_counts"] == counts(succeeded=1, canceled=2)
        found = await results(harness, batch)
        assert found.pop("a")["message"]["content"][0]["text"] == "yes"
        assert found == {"b": {"type": "canceled"}, "c": {"type": "canceled"}}
        again = await harness.http("POST", f"{path}/cancel")
        assert (again.status, again.json["error"]["message"]) == (400, "the batch has ended")


async def test_message_batch_continues_after_a_kill(tmp_path: Path) -> None:
    async with serving_batches(tmp_path, None, batch_in_flight=1) as harness:
        batch = await begin(harness, *map(asked, "abc"))
        await harness.until(lambda: len(harness.worker.prompts) == 1)
        harness.worker.send(harness.worker.prompts[0].request_id, 0, tokens_of("yes"), STOP)
        await harness.until(lambda: len(harness.worker.prompts) == 2)
    with (tmp_path / "batches" / batch["id"][3:] / "output").open("ab") as output:
        output.write(b'{"id": "batch_req_1", "custom_id": "b", "resp')  # the process was killed
    async with serving_batches(tmp_path) as harness:
        batch = await ended(harness, batch["id"])
        assert batch["request_counts"] == counts(succeeded=3)
        found = await results(harness, batch)
        texts = [found[name]["message"]["content"][0]["text"] for name in "abc"]
        assert texts == ["yes", "fine", "fine"] and len(harness.worker.prompts) == 2


async def test_expired_and_failed_message_batches_say_what_is_unanswered(tmp_path: Path) -> None:
    async with serving_batches(tmp_path, None) as harness:
        late, lost = [(await begin(harness, asked("a")))["id"] for _ in range(2)]
        await harness.until(lambda: len(harness.worker.prompts) == 2)
    record = tmp_path / "batches" / late[3:] / "batch.json"
    record.write_text(json.dumps({**json.loads(record.read_text()), "expires_at": 1}))
    lines = tmp_path / "batches" / lost[3:] / "input"
    whole = lines.read_bytes()
    lines.unlink()
    async with serving_batches(tmp_path) as harness:
        batch = await ended(harness, late)
        assert batch["request_counts"] == counts(expired=1)
        assert await results(harness, batch) == {"a": {"type": "expired"}}
        batch = await ended(harness, lost)
        assert batch["request_counts"] == counts(errored=1)
        lines.write_bytes(whole)
        result = (await results(harness, batch))["a"]
        assert (result["type"], result["error"]["error"]["type"]) == ("errored", "api_error")


async def test_message_batches_are_listed_by_page_and_key(tmp_path: Path) -> None:
    keys = ("ft-one-key-abc", "ft-two-key-abc")
    async with serving_batches(tmp_path, api_keys=keys) as harness:

        async def ask(query: str, key: str = keys[0]) -> Any:
            reply = await harness.http("GET", f"{BATCHES}{query}", None, {"x-api-key": key})
            return reply.json

        for _ in range(3):
            body = {"requests": [asked("a")]}
            await harness.http("POST", BATCHES, body, {"x-api-key": keys[0]})
        ids = [each["id"] for each in (await ask(""))["data"]]
        assert len(ids) == 3
        page = await ask("?limit=2")
        assert [each["id"] for each in page["data"]] == ids[:2]
        assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[0], ids[1], True)
        page = await ask(f"?after_id={ids[1]}")
        assert [each["id"] for each in page["data"]] == ids[2:] and not page["has_more"]
        page = await ask(f"?limit=2&before_id={ids[2]}")
        assert [each["id"] for each in page["data"]] == ids[:2] and not page["has_more"]
        assert (page["first_id"], page["last_id"]) == (ids[0], ids[1])
        assert not (await ask("", keys[1]))["data"]
        for query in (f"/{ids[0]}", "/batch_x", f"/{ids[0][3:]}", "/msgbatch_..", "?after_id=x"):
            error = await ask(query, keys[1])
            assert error["error"]["type"] == "not_found_error"
        for query in ("?limit=x", f"?after_id={ids[0]}&before_id={ids[1]}"):
            assert (await ask(query))["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ({}, "requests: field required"),
        ({"requests": []}, "requests: list should have at least 1 item"),
        ({"requests": {}}, "requests: input should be a valid list"),
        ({"requests": [{"custom_id": "a"}]}, "requests.0: params: field required"),
        ({"requests": [asked("a b")]}, "requests.0: custom_id: string should match pattern"),
        ({"requests": [asked("a"), asked("a")]}, "requests.1.custom_id: 'a' occurs twice"),
        ({"requests": [asked("a"), asked("b"), asked("c")]}, "requests: at most 2"),
        ({"requests": [asked("a", x=[1e15] * 40)]}, "requests.0: exceeds 600 bytes"),
        ({"requests": [asked("a")], "request": 1}, "request: extra inputs are not permitted"),
    ],
)
async def test_mistakes_of_message_batches_are_named(
    body: dict[str, Any], fault: str, tmp_path: Path
) -> None:
    raw = json.dumps(body, separators=(",", ":")).replace("1000000000000000.0", "1e15").encode()
    async with serving_batches(tmp_path, batch_lines=2, max_body_bytes=600) as harness:
        reply = await harness.http("POST", BATCHES, raw)
        assert (reply.status, reply.json["error"]["type"]) == (400, "invalid_request_error")
        assert fault in reply.json["error"]["message"]
