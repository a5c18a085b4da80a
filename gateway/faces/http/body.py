"""Reading a request: its bounded JSON body and the headers of foretoken."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import NoReturn, TypeVar

from fastapi import Request

from gateway.config import GatewayConfig
from gateway.faces.http.answers.sse import run_until_disconnect
from gateway.faces.http.errors import BodyTooLarge, BodyTooSlow, ClientDisconnected
from gateway.faces.http.schema import Json
from gateway.front import Front
from gateway.requests.reading_pool import LARGE_BYTES
from gateway.requests.timeout import TIMEOUT_KEY, parse_timeout
from gateway.types.sla_classes import SlaError, parse_header
from services.runtime.errors import InvalidArgument

SLA_HEADER = "x-foretoken-sla"
APPLICATION_HEADER = "x-foretoken-application"

T = TypeVar("T")


async def read_bytes(request: Request, config: GatewayConfig) -> bytes:
    """The body. Raises what `read_pieces` raises."""
    pieces = read_pieces(request, config, config.max_body_bytes, config.max_body_s)
    return b"".join([piece async for piece in pieces])


async def read_pieces(
    request: Request, config: GatewayConfig, limit_bytes: int, limit_s: float
) -> AsyncGenerator[bytes]:
    """The pieces of the body. Raises BodyTooLarge, BodyTooSlow, or ClientDisconnected."""
    if _announced_bytes(request) > limit_bytes:
        raise BodyTooLarge(limit_bytes)
    size, loop = 0, asyncio.get_running_loop()
    until_s = loop.time() + limit_s
    more = True
    while more:
        try:
            async with asyncio.timeout_at(min(until_s, loop.time() + config.body_wait_s)):
                message = await request.receive()
        except TimeoutError:
            raise BodyTooSlow(size) from None
        if message["type"] == "http.disconnect":
            raise ClientDisconnected
        piece, more = message.get("body", b""), message.get("more_body", False)
        size += len(piece)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        yield piece


async def read_and_decode(
    front: Front, request: Request, decode: Callable[[bytes], T], sla_class: str = ""
) -> T:
    """The decoded body, once the tokenization queue admits it; a large body is decoded in a thread.
    The request leaves the queue when its client disconnects. Raises what `read_pieces` and `decode`
    raise, ClientDisconnected, and ServiceError."""
    raw = await read_bytes(request, front.config)
    intake = front.first.intake  # the body names the model
    turn = intake.wait_for_turn(sla_class)
    await (turn if intake.admits_at_once else run_until_disconnect(request.receive, turn))
    if len(raw) <= LARGE_BYTES:
        return decode(raw)
    decoding = intake.read(partial(decode, raw), len(raw), sla_class)
    return await run_until_disconnect(request.receive, decoding)


def parse_json(raw: bytes) -> Json:
    """The body as an object. Raises InvalidArgument."""
    try:
        content = json.loads(raw.decode(), parse_constant=_refuse_constant)
        if b"\\u" in raw:  # an escape can be half of a surrogate pair, which is not UTF-8
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeError:
        raise InvalidArgument("", "the body is not valid UTF-8") from None
    except (ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0][:200]
        raise InvalidArgument("", f"the body is not valid JSON: {reason}") from None
    if not isinstance(content, dict):
        raise InvalidArgument("", "the body must be a JSON object")
    return content


def read_timeout(request: Request) -> float:
    """The client's timeout in seconds; infinite without the header."""
    text = request.headers.get(TIMEOUT_KEY)
    return float("inf") if text is None else parse_timeout(text)


def read_sla(request: Request) -> tuple[str, dict[str, float]]:
    """Class name and explicit budgets. Raises InvalidArgument naming the header."""
    try:
        return parse_header(request.headers.get(SLA_HEADER, ""))
    except SlaError as error:
        raise InvalidArgument(SLA_HEADER, str(error)) from None


def _announced_bytes(request: Request) -> int:
    """The length of the body in its header; 0 if there is none or it is no number."""
    text = request.headers.get("content-length", "")
    return int(text) if text.isascii() and text.isdigit() else 0


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
