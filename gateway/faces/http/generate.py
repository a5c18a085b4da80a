"""What both endpoints do: check, open one call, and answer it whole or as a stream."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.faces.http.answers.chunks import ChunkWriter, usage
from gateway.faces.http.answers.shapes import ChatShape, CompletionShape, Shape
from gateway.faces.http.answers.sse import EventStream, until_disconnect
from gateway.faces.http.body import (
    SLA_HEADER,
    parse_json,
    read_application,
    read_in_turn,
    read_sla,
    read_timeout,
)
from gateway.faces.http.errors import ClientGone
from gateway.faces.http.schema import Body, ChatBody, CompletionBody, read_body
from gateway.gateway import Gateway
from gateway.observed.traces import Trace
from gateway.requests.parser import Clock, Generation
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from observability import genai
from protos.generated import gateway_pb2
from services.runtime.errors import InvalidArgument

IGNORED_HEADER = "x-foretoken-ignored-fields"
T = TypeVar("T")
AskedT = TypeVar("AskedT", bound=CompletionBody | ChatBody)


class WholeAnswer(JSONResponse):
    """An answer that is sent at once; the call is over with it."""

    def __init__(
        self,
        content: dict[str, object],
        headers: Mapping[str, str],
        call: ClientCall,
        on_end: Callable[[], None],
    ):
        super().__init__(content, headers=headers)
        self._call, self._on_end = call, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
            self._call.on_whole_sent()
        finally:
            self._on_end()


async def complete(gateway: Gateway, request: Request) -> Response:
    """`POST /v1/completions`."""
    trace = _begin(gateway, request, genai.TEXT_COMPLETION)
    with trace.failing():
        asked = await _take_in(gateway, request, CompletionBody)

        def shaped(call: ClientCall) -> Shape:
            return CompletionShape(gateway.text, call, asked.body)

        return await _answer(gateway, request, asked, shaped, trace)


async def chat(gateway: Gateway, request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    trace = _begin(gateway, request, genai.CHAT)
    with trace.failing():
        asked = await _take_in(gateway, request, ChatBody)

        def shaped(call: ClientCall) -> Shape:
            return ChatShape(gateway.text, call, asked.body)

        return await _answer(gateway, request, asked, shaped, trace)


def _begin(gateway: Gateway, request: Request, operation: str) -> Trace:
    asked = {"http.request.method": request.method, "url.path": request.scope["path"]}
    return gateway.traces.begin(operation, request.headers, asked)


@dataclass(frozen=True, slots=True)
class _Asked(Generic[AskedT]):
    """A request as it came: when, what it says, a request for each of its prompts, and the bytes
    it took to say so, which its texts have no more of."""

    clock: Clock
    body: AskedT
    prompts: Sequence[gateway_pb2.GenerateRequest]
    size_bytes: int


async def _take_in(gateway: Gateway, request: Request, kind: type[AskedT]) -> _Asked[AskedT]:
    """Read once it is its turn."""
    sla_class = request.headers.get(SLA_HEADER, "").strip()
    clock = gateway.admit(read_timeout(request), sla_class=sla_class)

    def understand(raw: bytes) -> _Asked[AskedT]:
        body = read_body(kind, parse_json(raw))
        return _Asked(clock, body, body.requests(), len(raw))

    return await read_in_turn(gateway, request, understand, sla_class)


async def _answer(
    gateway: Gateway,
    request: Request,
    asked: _Asked[AskedT],
    shaped: Callable[[ClientCall], Shape],
    trace: Trace,
) -> Response:
    body = asked.body
    gateway.check_model(body.model)
    ignored = gateway.unknown_fields.pass_over(body.unknown, body.fields.keys())
    headers = {IGNORED_HEADER: ignored} if ignored else {}
    reading = _parse_all(gateway, request, asked.clock, asked.prompts, trace)
    if gateway.reads_at_once(asked.size_bytes):
        generations = await reading
    else:
        generations = await until_disconnect(request.receive, reading)
    call = gateway.open(generations, whole=not body.stream, trace=trace)

    def on_end() -> None:
        call.close()
        trace.end()

    try:
        shape = shaped(call)
        if body.stream:
            options = body.stream_options
            writer = ChunkWriter(shape, call, gateway.config.model_name, options)
            events = _events(call, writer, body, trace)
            return EventStream(events, on_end, headers)
        parts = await until_disconnect(request.receive, _collect(call, trace))
        content = await _spelled(body, lambda: _whole(gateway, call, shape, parts))
        return WholeAnswer(content, headers, call, on_end)
    except ClientGone:
        on_end()
        raise
    except BaseException:
        call.close()
        raise


def _whole(
    gateway: Gateway, call: ClientCall, shape: Shape, parts: list[list[ChoiceChunk]]
) -> dict[str, object]:
    return {
        "id": shape.id_prefix + call.answer_id,
        "object": shape.whole_object,
        "created": call.created_unix_s,
        "model": gateway.config.model_name,
        "choices": [shape.whole(choice) for choice in parts],
        "usage": usage(call),
        **shape.around_whole(parts),
    }


async def _parse_all(
    gateway: Gateway,
    request: Request,
    clock: Clock,
    prompts: Sequence[gateway_pb2.GenerateRequest],
    trace: Trace,
) -> list[Generation]:
    sla, application = read_sla(request), read_application(request)
    most = gateway.config.max_choices
    choices = sum(max(1, prompt.sampling.n) for prompt in prompts)
    if choices > most:
        field = "n" if len(prompts) == 1 else "prompt"
        raise InvalidArgument(field, f"at most {most} prompts x n choices in one request")
    gateway.check_room(choices, clock)
    for prompt in prompts:
        prompt.sla.CopyFrom(sla)
        prompt.application = application
    return [await gateway.parse(prompt, clock, trace) for prompt in prompts]


async def _collect(call: ClientCall, trace: Trace) -> list[list[ChoiceChunk]]:
    """Each choice's chunks, once all are over."""
    parts: list[list[ChoiceChunk]] = [[] for _ in call.lives]
    async for chunk in call.chunks():
        parts[chunk.index].append(chunk)
        trace.delivered()
    return parts


async def _spelled(body: Body, spell: Callable[[], T]) -> T:
    """A prompt's scores are as many as its tokens: they are spelled in a thread, others beside the
    streams that go on."""
    return spell() if body.scored is None else await asyncio.to_thread(spell)


async def _events(
    call: ClientCall, writer: ChunkWriter, body: Body, trace: Trace
) -> AsyncGenerator[bytes]:
    with trace.failing():
        async with aclosing(call.chunks()) as chunks:
            async for chunk in chunks:
                yield await _spelled(body, partial(writer.chunk, chunk))
                trace.delivered()
    if body.stream_options.include_usage:
        yield writer.usage(call)
