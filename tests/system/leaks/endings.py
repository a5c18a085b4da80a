"""Requests of every ending, over raw HTTP."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

KEY, LIMITED_KEY = "sk-free-0123456789", "sk-limited-0123456789"
STATUS_LINE_BYTES = 12  # HTTP/1.1 200
WAIT_S = 120.0  # for the end of an answer; only a failing run takes it
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TURNS = [{"role": "user", "content": "Count from 1 to 9."}]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}
LONG: dict[str, Any] = {"prompt": "Go", "max_tokens": 900, "ignore_eos": True}


@dataclass(frozen=True)
class Ending:
    """A request and the status of its answer. `leaves`: the client closes its
    connection at the first bytes of the answer, or without any for a status of 0."""

    path: str
    body: object
    status: int = 200
    others: tuple[int, ...] = ()  # statuses that depend on the load
    leaves: bool = False
    key: str = KEY
    headers: dict[str, str] = field(default_factory=dict)


def _both(path: str, status: int = 200, **body: Any) -> list[Ending]:
    """Complete and streamed."""
    return [Ending(path, body | {"stream": stream}, status) for stream in (False, True)]


ENDINGS: Sequence[Ending] = (
    *_both(CHAT, messages=TURNS, max_tokens=40, temperature=0),
    *_both(COMPLETIONS, prompt="Count", max_tokens=3, ignore_eos=True),
    *_both(CHAT, messages=TURNS, max_tokens=40, ignore_eos=True, stop=["e", " ", "1"]),
    *_both(CHAT, messages=TURNS, max_tokens=12, n=2),
    *_both(CHAT, messages=TURNS, max_tokens=40, tools=[TOOL], tool_choice="required"),
    *_both(COMPLETIONS, prompt="Give", max_tokens=40, structured_outputs={"json": SCHEMA}),
    *_both("/v1/messages", messages=TURNS, max_tokens=8),
    *_both("/v1/responses", input="Count", max_output_tokens=8, store=False),
    *_both(CHAT, 400, messages=TURNS, max_tokens="many"),
    *_both(CHAT, 404, messages=TURNS, model="nothing"),
    Ending(CHAT, "no object", 400),
    Ending(COMPLETIONS, {"prompt": "Count"}, 401, key="sk-unknown-0123456789"),
    Ending(COMPLETIONS, {"prompt": "Count"}, 429, (200,), key=LIMITED_KEY),
    Ending(COMPLETIONS, LONG, 504, (429,), headers={"x-request-timeout-s": "0.00001"}),
    Ending(COMPLETIONS, LONG, 504, (200, 429), headers={"x-request-timeout-s": "0.2"}),
    Ending(COMPLETIONS, LONG | {"stream": True}, leaves=True),
    Ending(COMPLETIONS, LONG, 0, leaves=True),
)


async def send_endings(host: str, port: int, count: int, at_a_time: int) -> list[str]:
    """Sends `count` requests of all endings in turn. What differed from the expected statuses."""
    numbers = iter(range(count))
    wrong: list[str] = []

    async def send() -> None:
        for number in numbers:  # shared: each is sent once
            ending = ENDINGS[number % len(ENDINGS)]
            status = await _status_of(host, port, ending)
            if status not in (ending.status, *ending.others):
                wrong.append(f"{ending} ended with {status}")

    async with asyncio.TaskGroup() as group:
        for _ in range(at_a_time):
            group.create_task(send())
    return wrong


async def _status_of(host: str, port: int, ending: Ending) -> int:
    """0: the client left before the answer."""
    body = json.dumps(ending.body).encode()
    headers = {
        "host": "x",
        "content-length": str(len(body)),
        "connection": "close",
        "authorization": f"Bearer {ending.key}",
        **ending.headers,
    }
    lines = [f"POST {ending.path} HTTP/1.1", *(f"{name}: {x}" for name, x in headers.items())]
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write("\r\n".join((*lines, "", "")).encode() + body)
        if not ending.status:
            await asyncio.sleep(0.02)  # most of these requests run by then
            return 0
        async with asyncio.timeout(WAIT_S):
            received = await reader.readexactly(STATUS_LINE_BYTES)
            if not ending.leaves:
                await reader.read(-1)
        return int(received.split()[1])
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
