"""What `python -m benchmarks.overload` measures with: its load, its client and its arithmetic."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import isnan

import pytest

from benchmarks.demo_load import POOL, Due, arriving, at_once, bodies
from benchmarks.open_loop import CUT, LATE, REFUSED, UNREACHABLE, Answer, drive
from benchmarks.overload import figures_of, kinds, tokens_per_s
from foretoken.ports import free_port
from models.tasks import examples

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": null}\n\n'
TEXT = b'data: {"choices": [{"delta": {"content": "one"}}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"
GONE = b'data: {"error": {"message": "request 1a2b3c gave up after 8 attempts"}}\n\n'
WHOLE = OK + ROLE + TEXT + TEXT + USAGE + DONE
HANGS = OK + ROLE


# --- the load


def test_the_same_seed_is_the_same_load_and_no_two_prompts_are_alike():
    some = bodies(500, seed=4)
    assert some == bodies(500, seed=4) != bodies(500, seed=5)
    assert len({str(json.loads(body)["messages"]) for body in some}) == 500


def test_most_answers_are_short_and_a_few_are_long():
    answers = {(e.system, e.user): e.answer for e in examples(0, POOL, held_out=False)}
    words = []
    for body in bodies(2_000, seed=1):
        turns = {turn["role"]: turn["content"] for turn in json.loads(body)["messages"]}
        words.append(len(answers[turns.get("system"), turns["user"]].split()))
    words.sort()
    assert words[1_000] < 15 and words[1_900] > 60 and words[1_980] > 200
    assert sum(words[1_800:]) > sum(words[:1_800]) * 0.8  # a tenth of the answers, half the work


def test_arrivals_come_in_order_at_the_rate_asked_for():
    load = arriving(bodies(1_000, seed=1), rate=50, seed=2)
    due = [d.at_s for d in load]
    assert due == sorted(due) and 18 < due[-1] < 22


# --- the client


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """A server that gives each connection the next answer, and hangs after HANGS."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = left.pop(0)
        await reader.readuntil(b"\r\n\r\n")
        for event in answer.split(b"\n\n"):
            writer.write(event + b"\n\n")
            await writer.drain()
        if answer is HANGS:
            await reader.read()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (WHOLE, ""),
        (b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 3\r\n\r\n{}", REFUSED),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}", "503"),
        (OK + TEXT + GONE, "request 1a2b3c gave up after 8 attempts"),
        (OK + TEXT + GONE + DONE, "request 1a2b3c gave up after 8 attempts"),
        (OK + TEXT, CUT),
        (b"", CUT),
        (HANGS, LATE),
    ],
)
async def test_every_way_an_answer_ends(answer: bytes, problem: str):
    async with answering(answer) as url:
        [seen] = await drive(url, at_once([b"{}"]), bound_s=0.5)
    assert seen.problem == problem
    assert seen.tokens == (0 if problem else 7)
    assert problem or 0 < seen.first_s <= seen.last_s


async def test_a_server_that_is_not_there():
    [seen] = await drive(f"http://127.0.0.1:{free_port()}", at_once([b"{}"]), bound_s=0.5)
    assert seen.problem == UNREACHABLE


async def test_who_hangs_holds_up_nobody_and_answers_keep_the_loads_order():
    load = [Due(0.0, b"{}"), Due(0.2, b"{}")]
    async with answering(HANGS, WHOLE) as url:
        first, second = await drive(url, load, bound_s=0.5)
    assert (first.problem, second.problem) == (LATE, "")
    assert second.first_s > second.due_s == 0.2


# --- the arithmetic, by hand


def test_tokens_between_two_times():
    answers = [
        Answer(0, 0, 10, 100),  # half of it inside
        Answer(4, 6, 8, 20),  # all
        Answer(4, 7, 7, 1),  # all of one token
        Answer(4, 20, 30, 50),  # none
        Answer(4, 0, 0, 0, LATE),
    ]
    assert tokens_per_s(answers, 5, 10) == pytest.approx((50 + 20 + 1) / 5)


def test_figures():
    answers = [
        Answer(0, 1, 3, 21),  # TPOT 0.1
        Answer(0, 6, 7, 11),  # its first token too late
        Answer(1, 2, 8, 2),  # its second too late
        Answer(0, 0, 0, 0, REFUSED),
        Answer(0, 0, 0, 0, "503"),
    ]
    found = figures_of(answers, lasts_s=10)
    assert found["norm_latency_s"] == pytest.approx((3 / 21 + 7 / 11 + 7 / 2) / 3)
    assert found["ttft_p50_s"] == 1 and found["ttft_p99_s"] == pytest.approx(5.9)
    assert found["goodput_share"] == 1 / 5
    assert (found["errors"], found["refused"]) == (1, 1)
    # from 2 s to 10 s: half of the first answer, all of the others
    assert found["tok_s"] == pytest.approx((10.5 + 11 + 2) / 8)


def test_nobody_came_back():
    found = figures_of([Answer(0, 0, 0, 0, LATE)], lasts_s=10)
    assert isnan(found["norm_latency_s"]) and isnan(found["ttft_p50_s"])
    assert (found["tok_s"], found["goodput_share"], found["errors"]) == (0, 0, 1)


def test_errors_are_counted_by_what_they_say():
    answers = [
        Answer(0, 0, 0, 0, f"request {name} gave up after 8 attempts") for name in ("1a2b", "3-c4")
    ]
    counted = kinds([*answers, Answer(0, 0, 0, 0, "503"), Answer(0, 0, 0, 0, REFUSED)])
    assert counted == Counter({"request … gave up after 8 attempts": 2, "503": 1})
