"""One HTTP request through the picker: Envoy's messages in, answers out.

headers ─▶ body … ─▶ end of the body: placed, or refused
                        │
answer's headers ─▶ its body … ─▶ end: learned
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from http import HTTPStatus
from math import inf

from protos.generated import ext_proc_pb2 as pb
from services.picker import messages
from services.picker.core.answers import Answer, AnswerFollower
from services.picker.core.picking import Cause, Refusal
from services.picker.core.pool import Placement
from services.picker.core.questions import (
    READ_HEADERS,
    HeaderError,
    Question,
    Terms,
    read_question,
    read_terms,
)
from services.picker.metrics import BROKEN, COMPLETE, ERROR
from services.picker.tracker import Tracker
from services.runtime.errors import InvalidArgument

STATUS = re.compile("[0-9]{3}")
RESPONSE_HEADERS = frozenset((":status", "content-type"))
# The endpoint has not taken the request, or has failed it; another one may not.
FAILED_STATUSES = frozenset(
    (HTTPStatus.BAD_GATEWAY, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)
)
# Larger bodies are read in a thread: 8 MiB of prompt delay the other streams by 0.2 s, else 0.07 s.
THREAD_BYTES = 2**18
BODY_MODES = (pb.FULL_DUPLEX_STREAMED, pb.NONE)  # of requests
Answers = Iterable[pb.ProcessingResponse]


class Exchange:
    """State of one stream. `on` takes its messages in order; `close` follows the last one."""

    def __init__(self, tracker: Tracker, clock: Callable[[], float]):
        self._tracker = tracker
        self._clock = clock
        self._terms = Terms()
        self._subset: frozenset[str] | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._began = False  # the headers of the request have come
        self._asked = False  # the request is complete
        self._without_body = False  # Envoy does not send it
        self._returns_body = True  # of the answer: Envoy has not kept it
        self._question = Question()
        self._placement: Placement | None = None
        self._placed_s = inf
        self._refused = False
        self._status = 0
        self._answer: AnswerFollower | None = None
        self._seen_tokens = 0
        self._over = False

    async def on(self, message: pb.ProcessingRequest) -> Answers:
        """The answers to one message; none after a refusal. Raises InvalidArgument for a message
        that does not fit here, such as those of a proxy that is configured in another way."""
        if message.HasField("protocol_config"):
            self._configure(message.protocol_config)
        handler = HANDLERS.get(message.WhichOneof("request") or "")
        return await handler(self, message) if handler and not self._refused else ()

    def close(self) -> None:
        """The stream has ended, whether the request has or not."""
        self._release()
        self._end(BROKEN)

    def _configure(self, modes: pb.ProtocolConfiguration) -> None:
        if modes.request_body_mode not in BODY_MODES:
            mode = modes.request_body_mode
            name = pb.BodySendMode.Name(mode) if mode in pb.BodySendMode.values() else mode
            raise InvalidArgument(
                "request_body_mode",
                f"must be FULL_DUPLEX_STREAMED, got {name}; set it in the filter's processing_mode",
            )
        self._without_body = modes.request_body_mode == pb.NONE
        self._returns_body = modes.response_body_mode == pb.FULL_DUPLEX_STREAMED

    # The request

    async def _on_request_headers(self, message: pb.ProcessingRequest) -> Answers:
        if self._began:
            raise InvalidArgument("request_headers", "must come once")
        self._began = True
        self._subset = messages.read_subset(message)
        headers = messages.read_headers(message.request_headers.headers, READ_HEADERS)
        try:
            self._terms = read_terms(headers)
        except HeaderError as error:
            return self._refuse(Refusal(Cause.BAD_HEADER, str(error)))
        if message.request_headers.end_of_stream or self._without_body:
            return await self._place(lambda _: ())
        return ()

    async def _on_request_body(self, message: pb.ProcessingRequest) -> Answers:
        self._require_headers("request_body")
        if self._asked:
            raise InvalidArgument("request_body", "must not follow the end of the request")
        chunk = message.request_body.body
        refusal = self._tracker.reserve(self._size, len(chunk))
        if refusal is not None:
            return self._refuse(refusal)
        self._size += len(chunk)
        self._parts.append(chunk)
        if not message.request_body.end_of_stream:
            return ()
        return await self._place(lambda body: messages.request_body(body, end_of_stream=True))

    async def _on_request_trailers(self, message: pb.ProcessingRequest) -> Answers:
        self._require_headers("request_trailers")
        trailers = pb.ProcessingResponse(request_trailers=pb.TrailersResponse())
        if self._asked:
            return (trailers,)
        return await self._place(
            lambda body: (*messages.request_body(body, end_of_stream=False), trailers)
        )

    def _require_headers(self, field: str) -> None:
        if not self._began:
            sentence = (
                "must follow request_headers; set processing_mode.request_header_mode to SEND"
            )
            raise InvalidArgument(field, sentence)

    async def _place(self, rest: Callable[[bytes], Answers]) -> Answers:
        """The answer to the request's headers, then what `rest` makes of its body."""
        self._asked = True
        body = b"".join(self._parts)
        if len(body) > THREAD_BYTES:
            self._question = await asyncio.to_thread(read_question, body)
        else:
            self._question = read_question(body)
        placed = await self._tracker.place(self._question, self._terms, self._subset)
        self._release()
        if isinstance(placed, Refusal):
            return self._refuse(placed)
        self._placement, self._placed_s = placed, self._clock()
        return (messages.destination_headers(placed.addresses), *rest(body))

    def _refuse(self, refusal: Refusal) -> Answers:
        self._refused = True
        self._release()
        self._tracker.record_refusal(refusal)
        return (messages.refuse(refusal),)

    def _release(self) -> None:
        self._tracker.release(self._size)
        self._parts, self._size = [], 0

    # The answer

    async def _on_response_headers(self, message: pb.ProcessingRequest) -> Answers:
        headers = messages.read_headers(message.response_headers.headers, RESPONSE_HEADERS)
        status = headers.get(":status", "")
        self._status = int(status) if STATUS.fullmatch(status) else 0
        if self._placement is not None:
            served_by = messages.read_served_by(message)
            self._tracker.on_served_by(self._placement, served_by)
            if self._status in FAILED_STATUSES:
                address = served_by or self._placement.addresses[0]
                self._tracker.on_failed(address, f"a request got status {self._status}")
        self._answer = self._tracker.follow(headers.get("content-type", ""))
        if message.response_headers.end_of_stream:
            self._end(COMPLETE)
        return (pb.ProcessingResponse(response_headers=pb.HeadersResponse()),)

    async def _on_response_body(self, message: pb.ProcessingRequest) -> Answers:
        body = message.response_body
        if self._answer is not None and not self._over:
            self._answer.feed(body.body)
            self._on_tokens(self._answer.answer.tokens)
            if body.end_of_stream:
                self._end(COMPLETE)
        return (messages.response_body(body, self._returns_body),)

    async def _on_response_trailers(self, message: pb.ProcessingRequest) -> Answers:
        self._end(COMPLETE)
        return (pb.ProcessingResponse(response_trailers=pb.TrailersResponse()),)

    def _on_tokens(self, tokens: int) -> None:
        if self._placement is not None and tokens > self._seen_tokens:
            waited_s = None if self._seen_tokens else self._clock() - self._placed_s
            self._tracker.on_tokens(self._placement, tokens, waited_s)
            self._seen_tokens = tokens

    def _end(self, result: str) -> None:
        """Ends a placed request once."""
        if self._placement is None or self._over:
            return
        self._over = True
        answer = Answer()
        if self._answer is not None:
            self._answer.end()
            answer = self._answer.answer
        failed = result == COMPLETE and self._status >= HTTPStatus.BAD_REQUEST
        took_s = self._clock() - self._placed_s
        self._tracker.end(
            self._placement, self._question, answer, ERROR if failed else result, took_s
        )


Handler = Callable[[Exchange, pb.ProcessingRequest], Awaitable[Answers]]
# Of all exchanges: bound methods of its own would make each a cycle, which only a collection frees.
HANDLERS: Mapping[str, Handler] = {
    "request_headers": Exchange._on_request_headers,
    "request_body": Exchange._on_request_body,
    "request_trailers": Exchange._on_request_trailers,
    "response_headers": Exchange._on_response_headers,
    "response_body": Exchange._on_response_body,
    "response_trailers": Exchange._on_response_trailers,
}
