"""Requests without a connection: HTTP bodies of files and programs, answered in this process.

They are decoded like the bodies of clients and get the same errors.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from gateway.faces.http.answers.writer import AnswerWriter
from gateway.faces.http.choices import CHAT, COMPLETIONS
from gateway.faces.http.errors import MESSAGES_PATH
from gateway.faces.http.generate import BodyT, GenerationEndpoint, check_choices, collect_chunks
from gateway.faces.http.messages.endpoints import MESSAGES
from gateway.faces.http.schema import Json
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.request_tracing import NO_TRACE
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from gateway.types.client_request import ClientRequest
from gateway.types.errors import MIN_RETRY_S
from gateway.types.generation import GenerationRequest, RequestArrival
from services.runtime.errors import Code, InvalidArgument, ServiceError

T = TypeVar("T")
Chunks = list[list[ChoiceChunk]]  # of each choice
REFUSALS = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE)
MAX_RETRY_S = 5.0  # between two attempts of a refused request


@dataclass(frozen=True)
class Urgency:
    """The SLA class of requests, and a priority that replaces theirs; None keeps it."""

    sla_class: str = ""
    priority: int | None = None

    def apply_to(self, request: ClientRequest) -> ClientRequest:
        priority = request.priority if self.priority is None else self.priority
        return replace(request, sla_class=self.sla_class, priority=priority)


@dataclass(frozen=True)
class PreparedRequest:
    """A checked and tokenized request. `prompts`: one for each prompt of its body."""

    gateway: Gateway
    prompts: Sequence[GenerationRequest]
    make_writer: Callable[[ClientCall], AnswerWriter]

    @property
    def choices(self) -> int:
        return sum(prompt.sampling.n for prompt in self.prompts)

    def encode(self, call: ClientCall, chunks: Chunks) -> dict[str, object]:
        """The body of the HTTP answer."""
        return self.make_writer(call).encode_whole(chunks)


async def _prepare(
    endpoint: GenerationEndpoint[BodyT], front: Front, fields: Json, urgency: Urgency
) -> PreparedRequest:
    body = endpoint.read(fields)
    if body.stream:
        raise InvalidArgument("stream", "is not available without a connection; remove it")
    gateway = front.select(body.model)
    front.unknown_fields.handle(body.unknown, body.fields.keys())
    requests = body.client_requests()
    check_choices(gateway, requests)
    arrival = RequestArrival(time.monotonic(), sla_class=urgency.sla_class)
    prompts = [await gateway.intake.parse(urgency.apply_to(each), arrival) for each in requests]
    return PreparedRequest(gateway, prompts, lambda call: endpoint.make_writer(gateway, call, body))


CHAT_URL, COMPLETION_URL = "/v1/chat/completions", "/v1/completions"
ENDPOINTS: Mapping[str, Callable[[Front, Json, Urgency], Awaitable[PreparedRequest]]] = {
    CHAT_URL: partial(_prepare, CHAT),
    COMPLETION_URL: partial(_prepare, COMPLETIONS),
    MESSAGES_PATH: partial(_prepare, MESSAGES),
}


async def prepare(front: Front, url: str, fields: Json, urgency: Urgency) -> PreparedRequest:
    """Decodes a body for the endpoint `url` of ENDPOINTS. Raises ServiceError; for a mistake of the
    client InvalidArgument, naming the field."""
    return await ENDPOINTS[url](front, fields, urgency)


async def answer(request: PreparedRequest, encode: Callable[[ClientCall, Chunks], T]) -> T:
    """What `encode` makes of the complete answer. Raises ServiceError."""
    now_s = time.monotonic()
    prompts = [replace(prompt, arrival_s=now_s) for prompt in request.prompts]
    call = await request.gateway.open(prompts, whole=True)
    try:
        chunks = await collect_chunks(call, NO_TRACE)
        encoded = encode(call, chunks)
        call.on_whole_sent()
        return encoded
    finally:
        call.close()
        call.forget()


async def retry_refused(attempt: Callable[[], Awaitable[T]], patience_s: float) -> T:
    """The result of `attempt`, repeated for up to `patience_s` while the server is too busy for it.
    Raises ServiceError."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return await attempt()
        except ServiceError as refusal:
            if refusal.code not in REFUSALS or time.monotonic() >= until_s:
                raise
            await asyncio.sleep(min(MAX_RETRY_S, max(MIN_RETRY_S, refusal.retry_after_s)))
