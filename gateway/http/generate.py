"""What both endpoints do: check, open one call, and answer it whole or as a stream."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from fastapi import Request, Response
from fastapi.responses import JSONResponse

from gateway.http.body import (
    parse_json,
    read_application,
    read_bounded,
    read_sla,
    read_timeout,
)
from gateway.http.schema import Body, ChatBody, CompletionBody, Json, read_body
from gateway.http.shapes import ChatShape, ChunkWriter, CompletionShape, Shape, usage
from gateway.http.sse import EventStream, until_disconnect
from gateway.requests.parser import Clock, Generation
from gateway.service import GatewayService
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from protos import gateway_pb2
from services.runtime.errors import InvalidArgument


async def complete(gateway: GatewayService, request: Request) -> Response:
    """`POST /v1/completions`."""
    clock, fields = await _take_in(gateway, request)
    body = read_body(CompletionBody, fields)
    shape = CompletionShape(gateway.text, body.logprobs is not None)
    return await _answer(gateway, request, clock, body, body.requests, shape)


async def chat(gateway: GatewayService, request: Request) -> Response:
    """`POST /v1/chat/completions`."""
    clock, fields = await _take_in(gateway, request)
    body = read_body(ChatBody, fields)
    shape = ChatShape(gateway.text, body.logprobs)
    return await _answer(gateway, request, clock, body, body.requests, shape)


async def _take_in(gateway: GatewayService, request: Request) -> tuple[Clock, Json]:
    """When it came, and what it says: read once it is its turn."""
    clock = gateway.admit(read_timeout(request))
    raw = await read_bounded(request, gateway.config.max_body_bytes)
    await gateway.take_turn()
    return clock, parse_json(raw)


async def _answer(
    gateway: GatewayService,
    request: Request,
    clock: Clock,
    body: Body,
    prompts: Callable[[], list[gateway_pb2.GenerateRequest]],
    shape: Shape,
) -> Response:
    gateway.check_model(body.model)
    call = gateway.open(_parse_all(gateway, request, clock, prompts()))
    if body.stream:
        writer = ChunkWriter(shape, call, gateway.config.model_name, body.include_usage)
        return EventStream(_events(call, writer, body.include_usage), call.close)
    parts = await until_disconnect(request.receive, _collect(call))
    return JSONResponse(
        {
            "id": shape.id_prefix + call.request_id,
            "object": shape.whole_object,
            "created": call.created_unix_s,
            "model": gateway.config.model_name,
            "choices": [shape.whole(choice) for choice in parts],
            "usage": usage(call),
        }
    )


def _parse_all(
    gateway: GatewayService,
    request: Request,
    clock: Clock,
    prompts: list[gateway_pb2.GenerateRequest],
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
    return [gateway.parse(prompt, clock) for prompt in prompts]


async def _collect(call: ClientCall) -> list[list[ChoiceChunk]]:
    """Each choice's chunks, once all are over."""
    parts: list[list[ChoiceChunk]] = [[] for _ in call.lives]
    async for chunk in call.chunks():
        parts[chunk.index].append(chunk)
    return parts


async def _events(
    call: ClientCall, writer: ChunkWriter, include_usage: bool
) -> AsyncGenerator[bytes]:
    async with aclosing(call.chunks()) as chunks:
        async for chunk in chunks:
            yield writer.chunk(chunk)
    if include_usage:
        yield writer.usage(call)
