"""A live server with drafts: several tokens per step reach clients in order, and end where they
should."""

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest

from tests.live import Live, serving, wait_for

COUNTED = " ".join(str(number) for number in range(5, 60))
ASKED = {"role": "user", "content": "Count from 5 to 59."}
TURNS = [ASKED, {"role": "assistant", "content": COUNTED}, ASKED]
ACCEPTED = "foretoken_spec_decode_num_accepted_tokens_total{"


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serving("--speculative-tokens", "6", "--set", "log.path=") as running:
        yield running


def ask(live: Live, **fields: Any) -> str:
    body = {"model": "demo", "messages": TURNS, "temperature": 0, "max_tokens": 120, **fields}
    headers = {"content-type": "application/json"}
    request = Request(f"{live.http}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())


def accepted(live: Live) -> float:
    with urlopen(f"{live.http}/metrics", timeout=60) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(ACCEPTED))


@pytest.mark.slow
def test_answers_of_a_server_with_drafts_are_exact(live: Live) -> None:
    answer = json.loads(ask(live, logprobs=True, top_logprobs=2))
    [choice] = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (COUNTED, "stop")
    scored = choice["logprobs"]["content"]
    assert len(scored) == answer["usage"]["completion_tokens"] == 56, "the end token has a score"
    assert "".join(token["token"] for token in scored[:-1]) == COUNTED
    wait_for(lambda: accepted(live) > 30)


@pytest.mark.slow
def test_answers_with_drafts_end_at_stop_strings_and_budgets(live: Live) -> None:
    before = accepted(live)
    [stopped] = json.loads(ask(live, stop=["31"]))["choices"]
    assert stopped["message"]["content"] == COUNTED[: COUNTED.index("31")]
    assert stopped["finish_reason"] == "stop"
    [cut] = json.loads(ask(live, max_tokens=7))["choices"]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("5 6 7 8 9 10 11", "length")
    wait_for(lambda: accepted(live) > before)  # the gateway reads a worker's metrics now and then


@pytest.mark.slow
def test_streamed_answers_with_drafts_have_fewer_events_than_tokens(live: Live) -> None:
    events = [json.loads(line[6:]) for line in ask(live, stream=True).split("\n") if "{" in line]
    texts = [event["choices"][0]["delta"].get("content") or "" for event in events]
    assert "".join(texts) == COUNTED
    assert sum(1 for text in texts if text) < 40
