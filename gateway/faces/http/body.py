"""Reading a request: its bounded JSON body and the headers that are ours."""

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from fastapi import Request

from gateway.config import GatewayConfig
from gateway.faces.http.answers.sse import until_disconnect
from gateway.faces.http.errors import BodyTooLarge, BodyTooSlow, ClientGone
from gateway.faces.http.schema import Json
from gateway.gateway import Gateway
from gateway.requests.metadata import TIMEOUT_KEY, parse_timeout
from gateway.requests.reading_pool import LARGE_BYTES
from gateway.requests.sla import SlaError, parse_header
from protos.generated import common_pb2
from services.runtime.errors import InvalidArgument

SLA_HEADER = "x-foretoken-sla"
APPLICATION_HEADER = "x-foretoken-application"

T = TypeVar("T")


async def read_bounded(request: Request, config: GatewayConfig) -> bytes:
    """The body's bytes. Raises BodyTooLarge, BodyTooSlow, and ClientGone when its client leaves."""
    chunks, size = [], 0
    limit_bytes, loop = config.max_body_bytes, asyncio.get_running_loop()
    until_s = loop.time() + config.max_body_s
    more = True
    while more:
        try:
            async with asyncio.timeout_at(min(until_s, loop.time() + config.body_wait_s)):
                message = await request.receive()
        except TimeoutError:
            raise BodyTooSlow(size) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk, more = message.get("body", b""), message.get("more_body", False)
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


async def read_in_turn(
    gateway: Gateway, request: Request, understand: Callable[[bytes], T], sla_class: str = ""
) -> T:
    """What `understand` makes of the body, once it is its turn; where it is large, in a thread.
    Raises what `read_bounded` does, and ServiceError."""
    raw = await read_bounded(request, gateway.config)
    await gateway.take_turn(sla_class)
    if len(raw) <= LARGE_BYTES:
        return understand(raw)
    reading = gateway.read(partial(understand, raw), len(raw), sla_class)
    return await until_disconnect(request.receive, reading)


def parse_json(raw: bytes) -> Json:
    """The body as an object. Raises InvalidArgument for what is none."""
    try:
        content = json.loads(raw.decode(), parse_constant=_refuse_constant)
        if b"\\u" in raw:  # an escape can spell half a character, which is no text
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
    """Seconds the client gives the request, infinite without the header."""
    text = request.headers.get(TIMEOUT_KEY)
    return float("inf") if text is None else parse_timeout(text)


def read_sla(request: Request) -> common_pb2.Sla:
    """The SLA asked for; raises InvalidArgument naming the header."""
    try:
        name, budgets = parse_header(request.headers.get(SLA_HEADER, ""))
        return common_pb2.Sla(name=name, **budgets)
    except SlaError as error:
        raise InvalidArgument(SLA_HEADER, str(error)) from None
    except ValueError:
        raise InvalidArgument(
            SLA_HEADER, "unknown budget; known: ttft_s, tpot_s, mtpot_s"
        ) from None


def read_application(request: Request) -> str:
    return request.headers.get(APPLICATION_HEADER, "")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")
