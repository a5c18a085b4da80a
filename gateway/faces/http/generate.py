"""Text generation over HTTP: decode a request, open one call, encode its answer."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, Protocol, TypeVar

from fastapi import Request, Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from gateway.admission.deadline import within_deadline
from gateway.faces.http.answers.direct import DirectStream, direct_stream, head_read_s
from gateway.faces.http.answers.sse import EventStream, run_until_disconnect
from gateway.faces.http.answers.writer import AnswerWriter
from gateway.faces.http.body import (
    APPLICATION_HEADER,
    SLA_HEADER,
    parse_json,
    read_and_decode,
    read_sla,
    read_timeout,
)
from gateway.faces.http.dialect.fields import FieldRule
from gateway.faces.http.errors import ClientDisconnected
from gateway.faces.http.schema import Json
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.request_tracing import RequestTrace
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from gateway.types.client_request import ClientRequest
from gateway.types.constraint import Constraint
from gateway.types.generation import GenerationRequest, RequestArrival
from services.runtime.errors import InvalidArgument

IGNORED_HEADER = "x-foretoken-ignored-fields"
T = TypeVar("T")


class GenerationBody(Protocol):
    """What every endpoint's body has."""

    @property
    def fields(self) -> Mapping[str, FieldRule]: ...
    @property
    def model(self) -> str: ...
    @property
    def stream(self) -> bool: ...
    @property
    def unknown(self) -> Sequence[str]:
        """Names of unknown fields in the body."""
        ...

    @property
    def constraint(self) -> Constraint | None: ...
    @property
    def recalled_bytes(self) -> int:
        """Bytes of the prompt that are not in the body: an earlier conversation."""
        ...

    def client_requests(self) -> list[ClientRequest]:
        """One for each prompt. Raises InvalidArgument naming the field."""
        ...


BodyT = TypeVar("BodyT", bound=GenerationBody)


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[BodyT]):
    """What distinguishes one endpoint that generates text from the others."""

    read: Callable[[Json], BodyT]  # raises InvalidArgument
    make_writer: Callable[[Gateway, ClientCall, BodyT], AnswerWriter]
    operation: str  # its name in traces


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

    def __init__(self, stream: DirectStream, writer: AnswerWriter, trace: RequestTrace):
        self._stream, self._writer, self._trace = stream, writer, trace

    @property
    def ready(self) -> bool:
        return self._stream.ready

    def write(self, chunk: ChoiceChunk) -> None:
        if data := self._writer.encode_chunk(chunk):
            self._stream.write(data)
        self._trace.on_chunk_sent()


@dataclass
class OpenAnswer(Generic[BodyT]):
    """A submitted request, of which nothing is sent yet. `end` or `fail` must be called once."""

    gateway: Gateway
    call: ClientCall
    body: BodyT
    headers: Mapping[str, str]
    trace: RequestTrace
    writer: AnswerWriter = field(init=False)

    def end(self) -> None:
        """The client has the answer, or has left."""
        self.call.close()
        self.trace.end()
        self.call.forget()

    def fail(self, error: BaseException) -> None:
        """There will be no answer."""
        self.call.close()
        self.trace.end(error)
        self.call.forget()

    @contextmanager
    def ends_on_error(self) -> Iterator[None]:
        """An exception of the block ends the call."""
        try:
            yield
        except ClientDisconnected:
            self.end()
            raise
        except BaseException as error:
            self.fail(error)
            raise

    async def collect(self) -> dict[str, object]:
        """The complete answer, once all choices have ended. Raises ServiceError."""
        choices = await collect_chunks(self.call, self.trace)
        return await self.encode(partial(self.writer.encode_whole, choices))

    async def respond(self, request: Request) -> Response:
        """The answer for the client, complete or as a stream."""
        with self.ends_on_error():
            if not self.body.stream:
                content = await run_until_disconnect(request.receive, self.collect())
                return WholeAnswer(content, self.headers, self.call, self.end)
            stream = direct_stream(request.scope)
            if stream is not None and not self.writer.slow:
                self.call.sink = EventSink(stream, self.writer, self.trace)
            writer, ping_s = self.writer, self.gateway.config.stream_ping_s
            return EventStream(
                self._events(), writer.encode_last, self.end, ping_s, writer.ping, self.headers
            )

    async def _events(self) -> AsyncGenerator[bytes]:
        with self.trace.ends_on_error():
            async with aclosing(self.call.chunks()) as chunks:
                async for chunk in chunks:
                    if data := await self.encode(partial(self.writer.encode_chunk, chunk)):
                        yield data
                    self.trace.on_chunk_sent()
        if data := self.writer.encode_tail():
            yield data

    async def encode(self, encode: Callable[[], T]) -> T:
        """What `encode` returns, which a thread runs if the writer is slow now."""
        return await asyncio.to_thread(encode) if self.writer.slow else encode()


async def generate(front: Front, request: Request, endpoint: GenerationEndpoint[BodyT]) -> Response:
    """Answers a request to an endpoint."""
    answer = await open_answer(front, request, endpoint)
    return await answer.respond(request)


async def open_answer(
    front: Front, request: Request, endpoint: GenerationEndpoint[BodyT]
) -> OpenAnswer[BodyT]:
    """Reads a request and submits it. Raises ServiceError and ClientDisconnected."""
    attributes = {"http.request.method": request.method, "url.path": request.scope["path"]}
    trace = front.tracer.begin(endpoint.operation, request.headers, attributes)
    with trace.ends_on_error():
        sla_class = request.headers.get(SLA_HEADER, "").strip()
        since_s = head_read_s(request.scope)
        arrival = front.admit(read_timeout(request), sla_class, since_s)

        def decode(raw: bytes) -> tuple[BodyT, Sequence[ClientRequest], int]:
            body = endpoint.read(parse_json(raw))
            return body, body.client_requests(), len(raw) + body.recalled_bytes

        async with within_deadline(arrival):
            body, requests, size_bytes = await read_and_decode(front, request, decode, sla_class)
            gateway = front.select(body.model)
            trace.on_model(gateway.config.model_name)
            ignored = front.unknown_fields.handle(body.unknown, body.fields.keys())
            parsing = _parse_all(gateway, request, arrival, requests, trace)
            # The prompts are at most as long as the body and what it recalls.
            if gateway.intake.reads_quickly(size_bytes, requests[0]):
                generation_requests = await parsing
            else:
                generation_requests = await run_until_disconnect(request.receive, parsing)
        call = await gateway.open(generation_requests, whole=not body.stream, trace=trace)
    headers = {IGNORED_HEADER: ignored} if ignored else {}
    if call.grant is not None:
        headers |= call.grant.usage.headers(time.monotonic())
    answer = OpenAnswer(gateway, call, body, headers, trace)
    with answer.ends_on_error():
        answer.writer = endpoint.make_writer(gateway, call, body)
    return answer


async def collect_chunks(call: ClientCall, trace: RequestTrace) -> list[list[ChoiceChunk]]:
    """The chunks of each choice, once all choices have ended."""
    choices: list[list[ChoiceChunk]] = [[] for _ in call.choices]
    async for chunk in call.chunks():
        choices[chunk.index].append(chunk)
        trace.on_chunk_sent()
    return choices


def check_choices(gateway: Gateway, requests: Sequence[ClientRequest]) -> int:
    """The number of choices of one body. Raises InvalidArgument if a call may not have so many."""
    choices, most = sum(each.choices for each in requests), gateway.config.max_choices
    if choices > most:
        name = "n" if len(requests) == 1 else "prompt"
        raise InvalidArgument(name, f"at most {most} prompts x n choices in one request")
    return choices


async def _parse_all(
    gateway: Gateway,
    request: Request,
    arrival: RequestArrival,
    requests: Sequence[ClientRequest],
    trace: RequestTrace,
) -> list[GenerationRequest]:
    sla_class, budgets = read_sla(request)
    application = request.headers.get(APPLICATION_HEADER, "")
    gateway.intake.check_room(check_choices(gateway, requests), arrival)
    complete_requests = [
        replace(each, sla_class=sla_class, sla_budgets=budgets, application=application)
        for each in requests
    ]
    return [await gateway.intake.parse(each, arrival, trace) for each in complete_requests]
