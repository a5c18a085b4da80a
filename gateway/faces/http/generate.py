"""Text generation over HTTP: decode a request, open one call, encode its answer."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.faces.http.answers.chunks import ChunkWriter, encode_usage
from gateway.faces.http.answers.direct import DirectStream, direct_stream
from gateway.faces.http.answers.formats import AnswerFormat
from gateway.faces.http.answers.sse import EventStream, run_until_disconnect
from gateway.faces.http.body import (
    APPLICATION_HEADER,
    SLA_HEADER,
    parse_json,
    read_and_decode,
    read_sla,
    read_timeout,
)
from gateway.faces.http.errors import ClientDisconnected
from gateway.faces.http.schema import Body, ChatBody, CompletionBody, read_body
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.request_tracing import RequestTrace
from gateway.requests.text import Text
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from gateway.types.client_request import ClientRequest
from gateway.types.generation import GenerationRequest, RequestArrival
from services.runtime.errors import InvalidArgument

IGNORED_HEADER = "x-foretoken-ignored-fields"
T = TypeVar("T")
BodyT = TypeVar("BodyT", bound=CompletionBody | ChatBody)


class WholeAnswer(JSONResponse):
    """A complete answer in one message. The call ends once it is sent."""

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


class EventSink:
    """Writes the events of a call directly to its client's connection."""

    def __init__(self, stream: DirectStream, writer: ChunkWriter, trace: RequestTrace):
        self._stream, self._writer, self._trace = stream, writer, trace

    @property
    def ready(self) -> bool:
        return self._stream.ready

    def write(self, chunk: ChoiceChunk) -> None:
        self._stream.write(self._writer.encode_chunk(chunk))
        self._trace.on_chunk_sent()


async def generate(
    front: Front,
    request: Request,
    kind: type[BodyT],
    make_format: Callable[[Text, ClientCall, BodyT], AnswerFormat],
    operation: str,
) -> Response:
    """Answers a request with a body of `kind`. `operation` is its name in traces."""
    attributes = {"http.request.method": request.method, "url.path": request.scope["path"]}
    trace = front.tracer.begin(operation, request.headers, attributes)
    with trace.ends_on_error():
        sla_class = request.headers.get(SLA_HEADER, "").strip()
        arrival = front.admit(read_timeout(request), sla_class)

        def decode(raw: bytes) -> tuple[BodyT, Sequence[ClientRequest], int]:
            body = read_body(kind, parse_json(raw))
            return body, body.client_requests(), len(raw)

        body, requests, size_bytes = await read_and_decode(front, request, decode, sla_class)
        gateway = front.select(body.model)
        trace.on_model(gateway.config.model_name)
        ignored = front.unknown_fields.handle(body.unknown, body.fields.keys())
        parsing = _parse_all(gateway, request, arrival, requests, trace)
        # The prompts are at most as long as the body.
        if gateway.intake.reads_quickly(size_bytes, body.constraint):
            generation_requests = await parsing
        else:
            generation_requests = await run_until_disconnect(request.receive, parsing)
        call = gateway.open(generation_requests, whole=not body.stream, trace=trace)
        headers = {IGNORED_HEADER: ignored} if ignored else {}
        return await _answer(gateway, request, call, body, make_format, headers, trace)


async def _answer(
    gateway: Gateway,
    request: Request,
    call: ClientCall,
    body: BodyT,
    make_format: Callable[[Text, ClientCall, BodyT], AnswerFormat],
    headers: Mapping[str, str],
    trace: RequestTrace,
) -> Response:
    def on_end() -> None:
        call.close()
        trace.end()
        call.forget()

    try:
        form = make_format(gateway.text, call, body)
        if body.stream:
            options = body.stream_options
            writer = ChunkWriter(form, call, _labels(gateway, call), options)
            stream = direct_stream(request.scope)
            if stream is not None and body.prompt_top_n is None:  # else a thread encodes
                call.sink = EventSink(stream, writer, trace)
            events = _write_events(call, writer, body, trace)
            return EventStream(events, on_end, headers)
        choices = await run_until_disconnect(request.receive, _collect_chunks(call, trace))
        content = await _encode(body, lambda: _encode_whole(gateway, call, form, choices))
        return WholeAnswer(content, headers, call, on_end)
    except ClientDisconnected:
        on_end()
        raise
    except BaseException as error:
        call.close()
        trace.end(error)
        call.forget()
        raise


def _encode_whole(
    gateway: Gateway, call: ClientCall, form: AnswerFormat, choices: list[list[ChoiceChunk]]
) -> dict[str, object]:
    return {
        "id": form.id_prefix + call.answer_id,
        "object": form.whole_object,
        "created": call.created_unix_s,
        **_labels(gateway, call),
        "choices": [form.whole_choice(chunks) for chunks in choices],
        "usage": encode_usage(call),
        **form.whole_extras(choices),
    }


def _labels(gateway: Gateway, call: ClientCall) -> Mapping[str, str]:
    return gateway.answer_labels(call.choices[0].request.client.adapter)


async def _parse_all(
    gateway: Gateway,
    request: Request,
    arrival: RequestArrival,
    requests: Sequence[ClientRequest],
    trace: RequestTrace,
) -> list[GenerationRequest]:
    sla_class, budgets = read_sla(request)
    application = request.headers.get(APPLICATION_HEADER, "")
    max_choices = gateway.config.max_choices
    choices = sum(each.choices for each in requests)
    if choices > max_choices:
        field = "n" if len(requests) == 1 else "prompt"
        raise InvalidArgument(field, f"at most {max_choices} prompts x n choices in one request")
    gateway.intake.check_room(choices, arrival)
    complete_requests = [
        replace(each, sla_class=sla_class, sla_budgets=budgets, application=application)
        for each in requests
    ]
    return [await gateway.intake.parse(each, arrival, trace) for each in complete_requests]


async def _collect_chunks(call: ClientCall, trace: RequestTrace) -> list[list[ChoiceChunk]]:
    """The chunks of each choice, once all choices have ended."""
    choices: list[list[ChoiceChunk]] = [[] for _ in call.choices]
    async for chunk in call.chunks():
        choices[chunk.index].append(chunk)
        trace.on_chunk_sent()
    return choices


async def _encode(body: Body, encode: Callable[[], T]) -> T:
    """The encoded answer. Prompt scores are as many as prompt tokens, so a thread encodes them."""
    return encode() if body.prompt_top_n is None else await asyncio.to_thread(encode)


async def _write_events(
    call: ClientCall, writer: ChunkWriter, body: Body, trace: RequestTrace
) -> AsyncGenerator[bytes]:
    with trace.ends_on_error():
        async with aclosing(call.chunks()) as chunks:
            async for chunk in chunks:
                yield await _encode(body, partial(writer.encode_chunk, chunk))
                trace.on_chunk_sent()
    if body.stream_options.include_usage:
        yield writer.encode_usage(call)
