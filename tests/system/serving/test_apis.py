"""Responses and messages of a live server with two gateway processes and the demo model."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest

from tests.live import Live, serving, wait_for

pytestmark = pytest.mark.slow
REVERSE, REVERSED = "Reverse: red blue green", "green blue red"
LONG: dict[str, Any] = {"input": REVERSE, "background": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving("--gateways", "2") as system:
        yield system


def ask(live: Live, method: str, path: str, body: object = None) -> Any:
    """One exchange over a connection of its own, which either gateway may accept."""
    reply = httpx.request(method, f"{live.http}/v1/{path}", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_stored_responses_are_found_by_every_gateway(live: Live):
    first = ask(live, "POST", "responses", {"input": REVERSE, "temperature": 0})
    assert first["output"][0]["content"][0]["text"] == REVERSED
    for _ in range(3):
        assert ask(live, "GET", f"responses/{first['id']}") == first
        again = {"input": "Copy: red", "previous_response_id": first["id"], "temperature": 0}
        assert ask(live, "POST", "responses", again)["status"] == "completed"
    assert ask(live, "DELETE", f"responses/{first['id']}")["deleted"]
    replies = [httpx.get(f"{live.http}/v1/responses/{first['id']}") for _ in range(8)]
    assert {reply.status_code for reply in replies} == {404}


@pytest.mark.parametrize("end", ["cancel", "delete"])
def test_background_responses_are_ended_by_any_gateway(live: Live, end: str):
    started = [ask(live, "POST", "responses", LONG)["id"] for _ in range(2)]
    for name in started:
        if end == "cancel":
            ask(live, "POST", f"responses/{name}/cancel")
        else:
            ask(live, "DELETE", f"responses/{name}")
    wait_for(lambda: all(load(live) == 0 for _ in range(8)), 30.0)
    if end == "cancel":
        states = {ask(live, "GET", f"responses/{name}")["status"] for name in started}
        assert states <= {"cancelled", "incomplete"}, states


def test_background_stream_is_read_again_from_the_gateway_that_runs_it(live: Live):
    body = {"input": REVERSE, "background": True, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{live.http}/v1/responses", json=body, timeout=60) as reply:
        first = json.loads(next(line for line in reply.iter_lines() if line[:6] == "data: ")[6:])
    path = f"responses/{first['response']['id']}"
    wait_for(lambda: ask(live, "GET", path)["status"] == "completed", 30.0)
    replies = [httpx.get(f"{live.http}/v1/{path}?stream=true", timeout=60) for _ in range(24)]
    read = [reply.text for reply in replies if reply.status_code == 200]
    assert len({*read}) == 1 and REVERSED in read[0], "each of its streams has the same events"
    elsewhere = [reply.text for reply in replies if reply.status_code == 400]
    assert len(read) + len(elsewhere) == 24
    assert all("this gateway process keeps no events" in text for text in elsewhere)


def load(live: Live) -> int:
    return int(httpx.get(f"{live.http}/load").json()["server_load"])


def test_messages_are_answered_whole_and_streamed(live: Live):
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": REVERSE}],
        "max_tokens": 64,
        "temperature": 0,
    }
    message = ask(live, "POST", "messages", body)
    assert message["content"] == [{"type": "text", "text": REVERSED}]
    streamed = ""
    with httpx.stream("POST", f"{live.http}/v1/messages", json={**body, "stream": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                delta = json.loads(line[6:]).get("delta", {})
                streamed += delta.get("text", "")
    assert streamed == REVERSED
    counted = ask(live, "POST", "messages/count_tokens", body)["input_tokens"]
    usage = message["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
