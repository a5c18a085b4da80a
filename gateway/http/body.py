"""Reading a request: its bounded JSON body and the headers that are ours."""

import json
from typing import NoReturn

from fastapi import Request

from gateway.http.errors import BodyTooLarge
from gateway.http.schema import Json
from gateway.requests.sla import SlaError, parse_header
from gateway.service import TIMEOUT_KEY, parse_timeout
from protos import common_pb2
from services.runtime.errors import InvalidArgument

SLA_HEADER = "x-foretoken-sla"
APPLICATION_HEADER = "x-foretoken-application"


async def read_bounded(request: Request, limit_bytes: int) -> bytes:
    """The body's bytes; raises BodyTooLarge."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit_bytes:
            raise BodyTooLarge(limit_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


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
