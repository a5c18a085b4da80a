"""The overload benchmark: load, options, client and figures."""

import asyncio
import json
from argparse import Namespace
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from math import isnan, nan
from pathlib import Path

import pytest

from benchmarks.overload.__main__ import QUICK, estimated_s, names_of, sizes_of
from benchmarks.overload.demo_load import (
    POOL,
    DueRequest,
    burst_load,
    demo_pool,
    draw_bodies,
    poisson_load,
)
from benchmarks.overload.figures import best_systems, count_errors, figures_of, tokens_per_s
from benchmarks.overload.open_loop import REFUSED, Answer, send_load
from benchmarks.overload.systems import (
    BY_CLASS,
    PEER,
    SYSTEMS,
    ServedModel,
    bodies_for,
    knows_lengths,
)
from foretoken.bench.samples import TIMED_OUT, TRUNCATED, UNREACHABLE
from foretoken.running.ports import free_port
from models.tasks import examples
from services.policies.preset import presets
from services.predictor.interface import Prompt, Query
from services.predictor.models.lengths_file import read_lengths
from services.predictor.models.oracle import OraclePredictor
from tests.gateway.gateway_fakes import demo_text

OK = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
ROLE = b'data: {"choices": [{"delta": {"role": "assistant", "content": ""}}], "usage": null}\n\n'
TEXT = b'data: {"choices": [{"delta": {"content": "one"}}], "usage": null}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 7}}\n\n'
DONE = b"data: [DONE]\n\n"
GONE = b'data: {"error": {"message": "request 1a2b3c gave up after 8 attempts"}}\n\n'
WHOLE = OK + ROLE + TEXT + TEXT + USAGE + DONE
HANGS = OK + ROLE


# --- the load


@pytest.mark.slow
def test_seed_determines_a_load_of_unique_prompts():
    bodies = draw_bodies(500, seed=4)
    assert bodies == draw_bodies(500, seed=4) != draw_bodies(500, seed=5)
    assert len({str(json.loads(body)["messages"]) for body in bodies}) == 500


@pytest.mark.slow
def test_most_answers_are_short_and_a_few_are_long():
    answers = {(e.system, e.user): e.answer for e in examples(0, POOL, held_out=False)}
    words = []
    for body in draw_bodies(2_000, seed=1):
        turns = {turn["role"]: turn["content"] for turn in json.loads(body)["messages"]}
        words.append(len(answers[turns.get("system"), turns["user"]].split()))
    words.sort()
    assert words[1_000] < 15 and words[1_900] > 60 and words[1_980] > 200
    assert sum(words[1_800:]) > sum(words[:1_800]) * 0.8  # a tenth has half the words


@pytest.mark.slow
def test_poisson_load_is_ordered_and_has_the_rate():
    load = poisson_load(draw_bodies(1_000, seed=1), rate=50, seed=2)
    due_s = [request.due_s for request in load]
    assert due_s == sorted(due_s) and 18 < due_s[-1] < 22


@pytest.mark.slow
def test_oracle_has_every_prompt_of_the_load(tmp_path: Path):
    """Looked up by the texts that a gateway forwards."""
    path = tmp_path / "lengths.jsonl"
    demo_pool().write_lengths(path)
    oracle = OraclePredictor(read_lengths(str(path), 8_192))
    answers = {(e.system, e.user): e.answer for e in examples(0, POOL, held_out=False)}
    for body in draw_bodies(100, seed=9):
        turns = {turn["role"]: turn["content"] for turn in json.loads(body)["messages"]}
        prompt = Prompt(turns.get("system", ""), turns["user"], 20)
        [forecast] = oracle.forecast([Query("demo", "", 20, 1_024, prompt=prompt)])
        correct = demo_text().encode(answers[turns.get("system"), turns["user"]])
        assert forecast.source == "oracle"
        assert forecast.points == (len(correct) + 1,)


# --- options


def options(**given: object) -> Namespace:
    defaults = {"quick": False, "presets": "", "factors": "", "rounds": 0, "seconds": 0.0}
    return Namespace(**defaults | {"peer_python": "", "capacity_of": "fcfs"} | given)


def test_systems_are_presets_then_the_peer():
    assert names_of(options()) == list(SYSTEMS)
    assert names_of(options(presets="all")) == list(presets())
    assert names_of(options(presets="all,alise-blend"))[-1] == "alise-blend"
    assert names_of(options(presets="alise,fcfs", peer_python="python")) == ["alise", "fcfs", PEER]
    with pytest.raises(SystemExit, match="no preset is called fifo; known: "):
        names_of(options(presets="fcfs,fifo"))
    inside = options(presets=f"{BY_CLASS},vllm+srtf", peer_python="python", capacity_of=PEER)
    assert names_of(inside) == [BY_CLASS, "vllm+srtf", PEER]
    for wrong in ({"presets": BY_CLASS}, {"capacity_of": PEER}):  # without a Python for vLLM
        with pytest.raises(SystemExit, match="no preset is called vllm"):
            names_of(options(**wrong))


def test_only_the_peer_that_sorts_by_class_gets_classes():
    model, lengths = ServedModel(), dict[str, int]()
    for chat, tokens in zip(demo_pool().chats, demo_pool().lengths, strict=True):
        lengths[json.dumps(chat)] = tokens
    plain = [json.loads(body) for body in bodies_for("vllm+srtf", model, 300, seed=2)]
    sorted_by_class = [json.loads(body) for body in bodies_for(BY_CLASS, model, 300, seed=2)]
    priorities = [body.pop("priority") for body in sorted_by_class]
    assert sorted_by_class == plain and set(priorities) == {0, 1, 2}
    for body, priority in zip(plain, priorities, strict=True):
        tokens = lengths[json.dumps(body["messages"])]
        assert priority == (0 if tokens <= 25 else 1 if tokens <= 100 else 2)


def test_overload_options_set_factors_rounds_and_seconds():
    sizes = sizes_of(options(factors="0.9,2", rounds=3))
    assert (sizes.arrivals_s, sizes.rounds) == ({0.9: 12, 2.0: 12}, 3)
    sizes = sizes_of(options(factors="1.5,3", seconds=4.0))
    assert sizes.arrivals_s == {1.5: 4, 3.0: 4}
    assert sizes_of(options(quick=True)) == QUICK
    for wrong in ("0.9;2", "0,1", "-1"):
        with pytest.raises(SystemExit, match="--factors takes numbers above 0"):
            sizes_of(options(factors=wrong))


def test_duration_estimate_includes_starts_and_drains():
    """20 s to start and settle, 100 requests at 80/s; then 6 s, and 6 + 12 s, because 3 times the
    load takes 3 times as long."""
    sizes = replace(QUICK, arrivals_s={0.9: 6, 3.0: 6})
    assert estimated_s(sizes, systems=2, rate=100) == pytest.approx(2 * (20 + 1.25 + 6 + 18))


# --- the client


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """A server that gives each connection the next answer, and hangs after HANGS."""
    left = list(answers)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answer = left.pop(0)
        await reader.readuntil(b"\r\n\r\n")
        for event in answer.split(b"\n\n") if answer else ():
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
        (OK + TEXT, TRUNCATED),
        (b"", TRUNCATED),
        (HANGS, TIMED_OUT),
    ],
)
async def test_answer_end_sets_the_problem(answer: bytes, problem: str):
    async with answering(answer) as url:
        [seen] = await send_load(url, burst_load([b"{}"]), timeout_s=0.5)
    assert seen.problem == problem
    assert seen.tokens == (0 if problem else 7)
    assert problem or 0 < seen.first_s <= seen.last_s


async def test_unreachable_server_is_an_error():
    [seen] = await send_load(f"http://127.0.0.1:{free_port()}", burst_load([b"{}"]), timeout_s=0.5)
    assert seen.problem == UNREACHABLE


async def test_hanging_request_does_not_delay_others():
    load = [DueRequest(0.0, b"{}"), DueRequest(0.2, b"{}")]
    async with answering(HANGS, WHOLE) as url:
        first, second = await send_load(url, load, timeout_s=0.5)
    assert (first.problem, second.problem) == (TIMED_OUT, "")
    assert second.first_s > second.due_s == 0.2


# --- figures


def test_tokens_between_two_times():
    answers = [
        Answer(0, 0, 10, 100),  # half of it counts
        Answer(4, 6, 8, 20),  # all
        Answer(4, 7, 7, 1),  # one token
        Answer(4, 20, 30, 50),  # none
        Answer(4, 0, 0, 0, TIMED_OUT),
    ]
    assert tokens_per_s(answers, 5, 10) == pytest.approx((50 + 20 + 1) / 5)


def test_figures_are_computed_from_answers():
    answers = [
        Answer(0, 1, 3, 21),  # TPOT 0.1
        Answer(0, 6, 7, 11),  # TTFT missed
        Answer(1, 2, 8, 2),  # TPOT missed
        Answer(0, 1, 3, 21, gap_s=1.6),  # MTPOT missed
        Answer(0, 0, 0, 0, REFUSED),
        Answer(0, 0, 0, 0, "503"),
    ]
    found = figures_of(answers, arrivals_s=10)
    assert found["norm_latency_s"] == pytest.approx((2 * 3 / 21 + 7 / 11 + 7 / 2) / 4)
    assert found["ttft_p50_s"] == 1 and found["ttft_p99_s"] == pytest.approx(5.85)
    assert found["gap_p99_s"] == pytest.approx(0.97 * 1.6)  # the longest of four, between ranks
    assert found["goodput_share"] == 1 / 6
    assert (found["errors"], found["refused"]) == (1, 1)
    # from 2 s to 10 s: half of the first and of the fourth answer, all of the others
    assert found["tok_s"] == pytest.approx((2 * 10.5 + 11 + 2) / 8)


def test_best_preset_excludes_oracles():
    assert knows_lengths("alise-oracle") and not knows_lengths("alise")
    figures = {
        "fcfs": (0.9, 0.5), "alise": (0.3, 0.4), "past-future": (0.6, 0.7), "alise-blend": (nan, 0),
        "alise-oracle": (0.1, 0.9), PEER: (0.05, 1.0),
    }  # fmt: skip
    medians = {
        name: {"3": {"norm_latency_s": latency, "goodput_share": share}}
        for name, (latency, share) in figures.items()
    }
    assert best_systems("3", medians) == (
        "3 ×: best of 4 in latency alise 0.3, past-future 0.6, fcfs 0.9; "
        "in goodput past-future 0.7, fcfs 0.5, alise 0.4; "
        "oracles: latency alise-oracle 0.1; goodput alise-oracle 0.9"
    )


def test_figures_without_answers_are_empty():
    found = figures_of([Answer(0, 0, 0, 0, TIMED_OUT)], arrivals_s=10)
    assert isnan(found["norm_latency_s"]) and isnan(found["ttft_p50_s"])
    assert (found["tok_s"], found["goodput_share"], found["errors"]) == (0, 0, 1)


def test_errors_are_counted_by_message():
    answers = [
        Answer(0, 0, 0, 0, f"request {name} gave up after 8 attempts") for name in ("1a2b", "3-c4")
    ]
    counted = count_errors([*answers, Answer(0, 0, 0, 0, "503"), Answer(0, 0, 0, 0, REFUSED)])
    assert counted == Counter({"request … gave up after 8 attempts": 2, "503": 1})
