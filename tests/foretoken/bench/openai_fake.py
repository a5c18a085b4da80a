"""A fake OpenAI-compatible server that records its requests and sends scripted answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


def event(**content: Any) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


def delta(text: str, reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "delta": {"content": text}, "finish_reason": reason}])


def usage(prompt: int, completion: int) -> bytes:
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": completion})


DONE = b"data: [DONE]\n\n"


@dataclass
class ScriptedAnswer:
    """An answer in chunks, with a pause before each; `closes_early` omits the final chunk."""

    pieces: Sequence[bytes] = (delta("a"), delta("b", "stop"), usage(3, 2), DONE)
    status: int = 200
    headers: str = ""
    closes_early: bool = False
    pause_s: float = 0.0
    gate: asyncio.Event | None = None  # the answer begins once it is set


def error_answer(status: int, message: str) -> ScriptedAnswer:
    body = json.dumps({"error": {"message": message, "type": "t"}}).encode()
    return ScriptedAnswer([body], status)


@dataclass
class ReceivedRequest:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class FakeServer:
    """The server: its requests so far, and the script that answers them."""

    models: ScriptedAnswer
    script: Callable[[ReceivedRequest], ScriptedAnswer]
    requests: list[ReceivedRequest] = field(default_factory=list)
    connections: int = 0
    in_flight: int = 0
    peak_concurrency: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client disconnected, or the test ended
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1]
        self.in_flight += 1
        self.peak_concurrency = max(self.peak_concurrency, self.in_flight)
        try:
            if path.endswith("/models"):
                answer = self.models
            else:
                self.requests.append(ReceivedRequest(path, headers, json.loads(raw or b"{}")))
                answer = self.script(self.requests[-1])
            await _send(writer, answer)
        finally:
            self.in_flight -= 1
        return not answer.closes_early


async def _send(writer: asyncio.StreamWriter, answer: ScriptedAnswer) -> None:
    if answer.gate:
        await answer.gate.wait()
    head = f"HTTP/1.1 {answer.status} X\r\nTransfer-Encoding: chunked\r\n{answer.headers}\r\n"
    writer.write(head.encode())
    for piece in answer.pieces:
        await asyncio.sleep(answer.pause_s)
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await writer.drain()
    if not answer.closes_early:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def model_list(*models: str, owner: str = "someone") -> ScriptedAnswer:
    cards = [{"id": model, "owned_by": owner} for model in models]
    return ScriptedAnswer([json.dumps({"data": cards}).encode()])


@asynccontextmanager
async def fake_server(
    script: Callable[[ReceivedRequest], ScriptedAnswer] = lambda _: ScriptedAnswer(),
    models: ScriptedAnswer | None = None,
) -> AsyncIterator[FakeServer]:
    """Run the server on a free port while the block runs."""
    fake = FakeServer(models or model_list("m"), script)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
