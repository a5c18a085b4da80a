"""The blocking HTTP client and `foretoken chat` over HTTP, against a fake server."""

import asyncio
from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from foretoken.client.address import HttpAddress
from foretoken.client.errors import (
    ForetokenError,
    InvalidRequest,
    Overloaded,
    ServerError,
    Unauthenticated,
    Unavailable,
)
from foretoken.client.http import HttpServer
from foretoken.commands.chat import chat
from services.core import FinishReason
from tests.foretoken.bench.openai_fake import (
    DONE,
    ScriptedAnswer,
    delta,
    error_answer,
    event,
    fake_server,
    model_list,
    usage,
)

HELLO = ScriptedAnswer([delta("hel"), delta("lo", "length"), usage(3, 2), DONE])
TURNS = [{"role": "user", "content": "hi"}]


async def test_http_stream_yields_chunks_finish_reason_and_usage() -> None:
    async with fake_server(lambda _: HELLO, model_list("m", "n")) as fake:

        def work() -> None:
            server = HttpServer(HttpAddress.parse(f"{fake.url}/v1/"), "sk-1")
            assert server.models() == ["m", "n"]
            stream = server.generate(TURNS, "m", "interactive", max_tokens=9)
            chunks = list(stream)
            assert [chunk.text for chunk in chunks] == ["hel", "lo"]
            assert chunks[-1].finish_reason is FinishReason.LENGTH
            assert stream.usage and stream.usage.completion_tokens == 2

        await asyncio.to_thread(work)
    [sent] = fake.requests
    assert (sent.path, sent.body["messages"]) == ("/v1/chat/completions", TURNS)
    assert sent.headers["authorization"] == "Bearer sk-1"
    assert (sent.headers["x-foretoken-sla"], sent.body["max_tokens"]) == ("interactive", 9)


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (error_answer(401, "no key"), Unauthenticated, "no key"),
        (error_answer(404, "no such model"), InvalidRequest, "no such model"),
        (error_answer(429, "queue is full"), Overloaded, "queue is full"),
        (error_answer(503, "draining"), Unavailable, "draining"),
        (ScriptedAnswer([b"<html>"], 500), ServerError, "answers with HTTP status 500"),
        (ScriptedAnswer([delta("a"), event(error={"message": "lost"})]), ServerError, "lost"),
        (ScriptedAnswer([b"data: {nonsense\n\n"]), Unavailable, "broke off"),
        (ScriptedAnswer([delta("a")], closes_early=True), Unavailable, "closed the connection"),
    ],
)
async def test_http_errors_map_to_client_errors(
    answer: ScriptedAnswer, kind: type[ForetokenError], message: str
) -> None:
    async with fake_server(lambda _: answer) as fake:

        def work() -> None:
            with pytest.raises(kind, match=message):
                list(HttpServer(HttpAddress.parse(fake.url)).generate(TURNS, "m", ""))

        await asyncio.to_thread(work)


async def test_http_stream_ends_when_cancelled() -> None:
    endless = ScriptedAnswer([delta("a")] * 1_000, pause_s=0.01)
    async with fake_server(lambda _: endless) as fake:

        def work() -> str:
            stream = HttpServer(HttpAddress.parse(fake.url)).generate(TURNS, "m", "")
            texts = []
            for chunk in stream:
                texts.append(chunk.text)
                stream.cancel()
            return "".join(texts)

        assert await asyncio.to_thread(work) == "a"


async def invoke(*arguments: str, lines: str = "") -> Any:
    app = Typer()
    app.command()(chat)
    return await asyncio.to_thread(CliRunner().invoke, app, list(arguments), lines)


async def test_chat_command_works_over_http() -> None:
    async with fake_server(lambda _: HELLO) as fake:
        done = await invoke(
            "--server", fake.url, "--seed", "7", lines="hi\n/system be kind\nagain\n/quit\nno\n"
        )
    assert done.exit_code == 0, done.output
    assert done.output.count("hello [cut at max_tokens]") == 2
    first, second = (each.body for each in fake.requests)
    assert (first["model"], first["seed"], first["messages"]) == ("m", 7, TURNS)
    assert [turn["role"] for turn in second["messages"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (error_answer(401, "no key"), "no key"),
        (ScriptedAnswer([b"<html>"]), "is not an OpenAI-compatible server"),
    ],
)
async def test_chat_reports_why_it_cannot_start(models: ScriptedAnswer, message: str) -> None:
    async with fake_server(models=models) as fake:
        done = await invoke("--server", fake.url)
    assert done.exit_code == 1 and message in " ".join(done.output.split())


async def test_chat_reports_an_unreachable_http_server() -> None:
    done = await invoke("--server", "http://127.0.0.1:1")
    assert done.exit_code == 1
    assert "no server answers at http://127.0.0.1:1" in done.output
