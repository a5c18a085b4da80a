"""An OpenAI-compatible server of a few lines: it records what it is asked and answers by script."""

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
class Answer:
    """Pieces are sent as chunks, each behind a pause; `hangs_up` before the last chunk's end."""

    pieces: Sequence[bytes] = (delta("a"), delta("b", "stop"), usage(3, 2), DONE)
    status: int = 200
    headers: str = ""
    hangs_up: bool = False
    pause_s: float = 0.0
    gate: asyncio.Event | None = None  # nothing is sent until it is set


def refusal(status: int, message: str) -> Answer:
    body = json.dumps({"error": {"message": message, "type": "t"}}).encode()
    return Answer([body], status)


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


@dataclass
class Fake:
    """What it was asked, and what it says; `connections` it has taken."""

    models: Answer
    script: Callable[[Asked], Answer]
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    now: int = 0
    at_once: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the test is over, or its client is
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        path = first.split()[1]
        self.now += 1
        self.at_once = max(self.at_once, self.now)
        try:
            if path.endswith("/models"):
                answer = self.models
            else:
                self.asked.append(Asked(path, headers, json.loads(raw)))
                answer = self.script(self.asked[-1])
            await _send(writer, answer)
        finally:
            self.now -= 1
        return not answer.hangs_up


async def _send(writer: asyncio.StreamWriter, answer: Answer) -> None:
    if answer.gate:
        await answer.gate.wait()
    head = f"HTTP/1.1 {answer.status} X\r\nTransfer-Encoding: chunked\r\n{answer.headers}\r\n"
    writer.write(head.encode())
    for piece in answer.pieces:
        await asyncio.sleep(answer.pause_s)
        writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
        await writer.drain()
    if not answer.hangs_up:
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def listing(*models: str, owner: str = "someone") -> Answer:
    cards = [{"id": model, "owned_by": owner} for model in models]
    return Answer([json.dumps({"data": cards}).encode()])


@asynccontextmanager
async def faking(
    script: Callable[[Asked], Answer] = lambda _: Answer(), models: Answer | None = None
) -> AsyncIterator[Fake]:
    """On a free port, for as long as the block runs."""
    fake = Fake(models or listing("m"), script)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
