"""Benchmark runs against a fake server."""

import asyncio
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from foretoken.bench.client import Server
from foretoken.bench.drive import LoadProgress
from foretoken.bench.lengths import parse_lengths
from foretoken.bench.load import Load
from foretoken.bench.measures import Budgets
from foretoken.bench.plot import draw
from foretoken.bench.prompts import from_file
from foretoken.bench.report import as_json, tables
from foretoken.bench.run import Outcome, Plan, Workload, bench
from foretoken.bench.samples import STOPPED, TIMED_OUT, TRUNCATED, UNREACHABLE, Sample
from foretoken.bench.served import ServedModel, find_model
from foretoken.client.address import HttpAddress
from tests.foretoken.bench.openai_fake import (
    DONE,
    FakeServer,
    ReceivedRequest,
    ScriptedAnswer,
    delta,
    error_answer,
    event,
    fake_server,
    model_list,
    usage,
)

WORDS = ("red", "blue", "green")
CLASSES = {"any": Budgets()}


def plan(*urls: str, load: Load | None = None, **more: Any) -> Plan:
    load = load or Load(requests=6, concurrency=2)
    return Plan(urls, load, more.pop("workload", Workload(WORDS)), CLASSES, **{"warm_up": 0} | more)


async def run(what: Plan, stop: asyncio.Event | None = None) -> list[Outcome]:
    return await bench(what, stop or asyncio.Event(), lambda *_: None)


def measured_requests(fake: FakeServer) -> list[ReceivedRequest]:
    """The requests after the two that probe the tokens per word."""
    return fake.requests[2:]


def shown(outcomes: list[Outcome], what: Plan) -> str:
    console = Console(width=140, file=io.StringIO(), record=True)
    for table in tables(outcomes, what):
        console.print(table)
    return " ".join(console.export_text().split())


async def test_closed_loop_keeps_its_concurrency() -> None:
    async with fake_server(lambda _: ScriptedAnswer(pause_s=0.005)) as fake:
        [outcome] = await run(plan(fake.url + "/v1/", api_key="sk-1", warm_up=3))
    assert len(fake.requests) == 2 + 3 + 6
    assert (
        fake.connections <= 4 and fake.peak_concurrency <= 4
    )  # the warm-up's four; they are used again
    last = fake.requests[-1]
    assert last.path == "/v1/chat/completions"
    assert last.headers["authorization"] == "Bearer sk-1"
    assert last.body["stream_options"] == {"include_usage": True}
    assert (last.body["model"], last.body["ignore_eos"], last.body["max_tokens"]) == ("m", True, 64)
    found = outcome.figures[0]
    assert (found.completed, found.output_tokens, found.prompt_tokens) == (6, 12, 18)
    assert found.peak_concurrency <= 2 and found.has_usage and not found.errors
    assert all(len(s.text_s) == 2 for s in outcome.rounds[0].samples)


async def test_open_loop_sends_without_waiting() -> None:
    """No request is answered until all have arrived."""
    gate = asyncio.Event()

    def script(_: ReceivedRequest) -> ScriptedAnswer:
        if len(measured_requests(fake)) == 8:
            gate.set()
        return ScriptedAnswer(gate=gate if measured_requests(fake) else None)

    async with fake_server(script) as fake:
        load = Load(requests=8, rate=200.0, arrivals="constant")
        [outcome] = await run(plan(fake.url, load=load))
    due = [s.due_s for s in outcome.rounds[0].samples]
    assert due == pytest.approx([number / 200 for number in range(8)])
    assert outcome.figures[0].completed == outcome.figures[0].peak_concurrency == 8


KINDS: list[tuple[ScriptedAnswer, str]] = [
    (ScriptedAnswer([delta("a"), DONE]), ""),
    (ScriptedAnswer([delta("a", "length")]), ""),  # some send no [DONE]
    (ScriptedAnswer([delta("a")]), TRUNCATED),
    (ScriptedAnswer([delta("a")], closes_early=True), TRUNCATED),
    (
        ScriptedAnswer([delta("a"), event(error={"message": "out of memory"}), DONE]),
        "out of memory",
    ),
    (error_answer(429, "queue is\nfull"), "HTTP 429: queue is full"),
    (ScriptedAnswer([b"<html>bad gateway</html>"], 502), "HTTP 502: <html>bad gateway</html>"),
    (ScriptedAnswer([b'{"detail": "Not Found"}'], 404), "HTTP 404: Not Found"),
    (ScriptedAnswer([b"data: {nonsense\n\n"]), "an event of the stream is not in OpenAI's format"),
    (ScriptedAnswer([b"data: [1]\n\n"]), "an event of the stream is not in OpenAI's format"),
    (ScriptedAnswer([delta("a")], pause_s=30), TIMED_OUT),
]


@pytest.mark.parametrize(("answer", "problem"), KINDS)
async def test_bench_records_each_failure(answer: ScriptedAnswer, problem: str) -> None:
    async with fake_server(lambda _: answer) as fake:
        server, sample = Server(fake.url), Sample(0.0)
        timeout_s = 0.1 if problem == TIMED_OUT else 20.0
        await server.stream("/v1/chat/completions", b"{}", sample, 0.0, timeout_s)
        await server.close()
    assert sample.problem == problem
    assert sample.status == answer.status


async def test_unreachable_server_fails_each_request() -> None:
    server, sample = Server("127.0.0.1:1"), Sample(0.0)
    await server.stream("/v1/completions", b"{}", sample, 0.0, 5.0)
    assert sample.problem == UNREACHABLE


async def test_closed_idle_connection_is_replaced() -> None:
    """The client's idle connection is lost after each complete answer."""
    whole = [delta("a", "stop"), usage(1, 1), DONE]
    ends = ScriptedAnswer(whole, headers="Connection: keep-alive\r\n")
    async with fake_server(lambda _: ends) as fake:
        server = Server(fake.url)
        for _ in range(3):
            sample = Sample(0.0)
            await server.stream("/v1/chat/completions", b"{}", sample, 0.0, 20.0)
            assert sample.problem == ""
            for idle in server._idle:
                idle.transport.abort()
            await asyncio.sleep(0)
        assert fake.connections == 3
        await server.close()


async def test_tokens_are_counted_by_messages_without_usage() -> None:
    texts = ScriptedAnswer([delta("a"), delta("b"), delta("c", "stop"), DONE])
    async with fake_server(lambda _: texts) as fake:
        what = plan(fake.url)
        outcomes = await run(what)
    assert outcomes[0].figures[0].output_tokens == 18
    reported = shown(outcomes, what)
    assert "tokens are estimated from messages: the server reports no usage" in reported
    assert "1.3 tokens per word" in reported


async def test_random_words_match_the_server_token_count() -> None:
    """The fake counts two tokens per word and five per conversation."""

    def count(asked: ReceivedRequest) -> ScriptedAnswer:
        words = len(asked.body["messages"][0]["content"].split())
        return ScriptedAnswer([delta("a", "length"), usage(5 + 2 * words, 1), DONE])

    asking = Workload(WORDS, inputs=parse_lengths("205", "-"), outputs=parse_lengths("9", "-"))
    async with fake_server(count) as fake:
        [outcome] = await run(plan(fake.url, workload=asking))
    assert {s.prompt_tokens for s in outcome.rounds[0].samples} == {205}
    assert {asked.body["max_tokens"] for asked in measured_requests(fake)} == {9}
    assert outcome.workload == "random words, server tokens"


async def test_bench_sends_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one"}\n\n{"prompt": "two", "max_tokens": 7}\n')
    asking = Workload(WORDS, file=from_file(file, 5, chat=False), chat=False)
    answer = ScriptedAnswer(
        [event(choices=[{"text": "a", "finish_reason": "stop"}]), usage(1, 1), DONE]
    )
    async with fake_server(lambda _: answer) as fake:
        [outcome] = await run(plan(fake.url, workload=asking))
    assert {asked.path for asked in fake.requests} == {"/v1/completions"}
    sent = sorted((asked.body["prompt"], asked.body["max_tokens"]) for asked in fake.requests)
    assert sent == [("one", 5)] * 3 + [("two", 7)] * 3
    assert outcome.figures[0].completed == 6 and "ignore_eos" not in fake.requests[0].body


async def test_bench_sends_demo_tasks_to_the_demo_model() -> None:
    async with fake_server(models=model_list("demo", owner="foretoken")) as fake:
        [outcome] = await run(plan(fake.url))
    assert outcome.workload == "the demo model's tasks" and len(fake.requests) == 6
    assert all(asked.body["messages"][-1]["role"] == "user" for asked in fake.requests)


async def test_requests_name_sla_classes_in_turn() -> None:
    async with fake_server() as fake:
        what = plan(fake.url, as_classes=("fast", "slow"))
        classes = {"fast": Budgets(ttft_s=1e-9), "slow": Budgets()}
        what = Plan(what.urls, what.load, what.workload, classes, "", "", what.as_classes, 1, 0)
        [outcome] = await run(what)
    named = [asked.headers["x-foretoken-sla"] for asked in measured_requests(fake)]
    assert sorted(named) == ["fast"] * 3 + ["slow"] * 3
    good = outcome.figures[0].goodput
    assert (good["fast"].met, good["fast"].total) == (0, 3)
    assert (good["slow"].met, good["slow"].total) == (3, 3)


async def test_compared_servers_get_the_same_requests(tmp_path: Path) -> None:
    order: list[str] = []

    def noting(name: str) -> Callable[[ReceivedRequest], ScriptedAnswer]:
        def note(_: ReceivedRequest) -> ScriptedAnswer:
            order.append(name)
            return ScriptedAnswer()

        return note

    async with fake_server(noting("a")) as one, fake_server(noting("b")) as other:
        what = plan(one.url, other.url, rounds=3, load=Load(requests=2, concurrency=1))
        outcomes = await run(what)
        assert order[4:] == [*"aabb", *"bbaa", *"aabb"]
        assert [a.body for a in measured_requests(one)] == [
            a.body for a in measured_requests(other)
        ]
    reported = shown(outcomes, what)
    assert "3 round(s), median (lowest–highest)" in reported and "second / first" in reported
    content = json.loads(json.dumps(as_json(outcomes, what), allow_nan=False))
    assert [server["url"] for server in content["servers"]] == [one.url, other.url]
    assert [len(r["samples"]) for r in content["servers"][0]["rounds"]] == [2, 2, 2]
    assert content["servers"][0]["medians"]["errors"] == 0
    assert content["classes"] == {"any": {"ttft_s": None, "tpot_s": None, "mtpot_s": None}}
    draw(tmp_path / "plot.png", outcomes)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"cannot write .*plot\.nonsense"):
        draw(tmp_path / "plot.nonsense", outcomes)


async def test_stopped_bench_reports_partial_results() -> None:
    stop = asyncio.Event()
    held: list[ReceivedRequest] = []

    def script(asked: ReceivedRequest) -> ScriptedAnswer:
        held.append(asked)
        if len(held) == 2 + 4:
            stop.set()
        return ScriptedAnswer(pause_s=0.0 if len(held) <= 2 + 3 else 60.0)

    async with fake_server(script) as fake:
        what = plan(fake.url, load=Load(requests=50, concurrency=1), rounds=2)
        outcomes = await run(what, stop)
    [went] = outcomes[0].rounds
    assert went.stopped and [s.problem for s in went.samples] == ["", "", "", STOPPED]
    assert "stopped after 3 of 50 requests" in shown(outcomes, what)
    assert "stopped before anything was measured" in shown([Outcome("u", "m", "")], what)


@pytest.mark.parametrize(
    ("models", "model", "message"),
    [
        (
            error_answer(401, "no key"),
            "",
            r"rejects the API key \(401: no key\); set --api-key",
        ),
        (ScriptedAnswer([b"{}"], 404), "", r"GET /v1/models returns 404"),
        (ScriptedAnswer([b"[]"]), "", "serves no model$"),
        (ScriptedAnswer([b"<html>"]), "", "serves no model$"),
        (model_list("a", "b"), "c", "does not serve 'c'; it serves a, b"),
    ],
)
async def test_unloadable_model_is_reported_in_one_sentence(
    models: ScriptedAnswer, model: str, message: str
) -> None:
    async with fake_server(models=models) as fake:
        with pytest.raises(ValueError, match=message):
            await run(plan(fake.url, model=model))
    assert not fake.requests


async def test_bench_stops_when_every_warm_up_request_fails() -> None:
    async with fake_server(lambda _: error_answer(400, "no chat template")) as fake:
        with pytest.raises(ValueError, match="fails every request: HTTP 400: no chat template"):
            await run(plan(fake.url))
    tasks = model_list("demo", owner="foretoken")
    async with fake_server(lambda _: error_answer(400, "no"), tasks) as fake:
        with pytest.raises(ValueError, match="fails every request: HTTP 400: no"):
            await run(plan(fake.url, warm_up=2))


async def test_unreachable_and_invalid_servers_are_distinguished() -> None:
    with pytest.raises(ValueError, match=r"no server answers at http://127.0.0.1:1: "):
        await run(plan("127.0.0.1:1"))

    async def speak(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-x\r\n")

    other = await asyncio.start_server(speak, "127.0.0.1", 0)
    port = other.sockets[0].getsockname()[1]
    with pytest.raises(ValueError, match=r"the server does not speak HTTP/1.1"):
        await run(plan(f"http://127.0.0.1:{port}"))
    other.close()


async def test_find_model_returns_the_owner() -> None:
    async with fake_server(models=model_list("x", "y", owner="vllm")) as fake:
        server = Server(fake.url)
        assert await find_model(server) == ServedModel("x", "vllm")
        assert await find_model(server, "y") == ServedModel("y", "vllm")
        await server.close()


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("localhost:80", HttpAddress("localhost", 80)),
        ("http://h", HttpAddress("h", 80)),
        ("https://h/v1", HttpAddress("h", 443, "", True)),
        ("https://h:9/api/v1/", HttpAddress("h", 9, "/api", True)),
        ("http://[::1]:8000", HttpAddress("::1", 8000)),
    ],
)
def test_http_address_parses_each_form(url: str, address: HttpAddress) -> None:
    assert HttpAddress.parse(url) == address


@pytest.mark.parametrize("url", ["", "ftp://h", "http://", "http://h:x", "http://h:99999"])
def test_invalid_address_is_a_one_line_error(url: str) -> None:
    with pytest.raises(ValueError, match="is not a server address"):
        HttpAddress.parse(url)


async def test_progress_counts_ended_requests() -> None:
    seen: list[tuple[int, int]] = []

    def tell(what: str, load: Load, now: LoadProgress) -> None:
        seen.append((now.ended, now.failed))

    answers = iter(
        [
            ScriptedAnswer(),
            ScriptedAnswer(),
            ScriptedAnswer(),
            error_answer(500, "x"),
            ScriptedAnswer(),
        ]
    )
    async with fake_server(lambda _: next(answers)) as fake:
        what = plan(fake.url, load=Load(requests=3, concurrency=1))
        await bench(what, asyncio.Event(), tell)
    assert seen == [(0, 0), (1, 0), (2, 1), (3, 1)]
