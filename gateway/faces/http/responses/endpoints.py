"""`/v1/responses`: OpenAI's API with items, typed events and stored conversations."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Mapping
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from gateway.admission.caller import current_caller
from gateway.faces.http.answers.items import AnswerItems
from gateway.faces.http.answers.sse import EventStream
from gateway.faces.http.describe import STREAMED, describe_body
from gateway.faces.http.dialect.pages import Paging
from gateway.faces.http.generate import GenerationEndpoint, open_answer
from gateway.faces.http.hot_paths import Endpoints
from gateway.faces.http.responses.body import ResponsesBody, read_responses_body
from gateway.faces.http.responses.errors import ResponseNotFound
from gateway.faces.http.responses.event_log import STARTING_AFTER
from gateway.faces.http.responses.items import Entry
from gateway.faces.http.responses.running import RunningResponses
from gateway.faces.http.responses.store import ResponseStore, StoredResponse
from gateway.faces.http.responses.writer import (
    ResponseWriter,
    describe_response,
    encode_stream_error,
)
from gateway.faces.http.tokens import count_tokens
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.sessions.call import ClientCall
from observability import genai
from services.runtime.errors import InvalidArgument

log = logging.getLogger(__name__)

RESPONSES_PATH = "/v1/responses"
SWITCHES = {"": False, "0": False, "false": False, "1": True, "true": True}
MAX_NUMBER_DIGITS = 9  # of an event
EXAMPLE = {"input": "Hello"}
PAGES = Paging(20, 100)  # as at OpenAI


def add_responses(app: FastAPI, front: Front) -> Endpoints:
    """Returns those that are asked often."""
    api = ResponsesApi(front)
    described = describe_body(ResponsesBody, EXAMPLE)

    @app.post(
        RESPONSES_PATH,
        summary="Answer an input of items",
        openapi_extra=described,
        responses=STREAMED,
    )
    async def create(request: Request) -> Response:
        return await api.create(request)

    @app.get(
        RESPONSES_PATH + "/{response_id}",
        summary="A stored response, or its events",
        responses=STREAMED,
    )
    async def retrieve(response_id: str, stream: str = "", starting_after: str = "") -> Response:
        content = api.find(response_id).content
        after = _read_after(stream, starting_after)
        return JSONResponse(content) if after is None else api.follow(response_id, after)

    @app.delete(RESPONSES_PATH + "/{response_id}", summary="Delete a stored response")
    async def delete(response_id: str) -> Response:
        return JSONResponse(await api.delete(response_id))

    @app.post(RESPONSES_PATH + "/{response_id}/cancel", summary="Cancel a background response")
    async def cancel(response_id: str) -> Response:
        return JSONResponse(await api.cancel(response_id))

    @app.get(
        RESPONSES_PATH + "/{response_id}/input_items",
        summary="All items before a response's output",
        openapi_extra=PAGES.parameters,
    )
    async def input_items(response_id: str, request: Request) -> dict[str, object]:
        return PAGES.select([*reversed(api.find(response_id).inputs)], request.query_params)

    @app.post(
        RESPONSES_PATH + "/input_tokens", summary="The tokens of an input", openapi_extra=described
    )
    async def input_tokens(request: Request) -> dict[str, object]:
        return await api.count_tokens(request)

    return {("POST", RESPONSES_PATH): create}


class ResponsesApi:
    """Creates responses and keeps those that may be named again."""

    def __init__(self, front: Front):
        config = front.config
        self._front = front
        self._store = ResponseStore(
            config.responses_file,
            config.max_stored_responses,
            config.max_stored_response_bytes,
            config.gateway_id,
        )
        self._running = RunningResponses(config, front.background, self._store)

    async def create(self, request: Request) -> Response:
        """`POST /v1/responses`."""
        owner = current_caller().key
        find = partial(self._store.find, owner=owner)
        endpoint = GenerationEndpoint(
            partial(read_responses_body, find), partial(self._make_writer, owner), genai.CHAT
        )
        answer = await open_answer(self._front, request, endpoint)
        if not answer.body.background:
            return await answer.respond(request)
        with answer.ends_on_error():
            queued = await self._running.start(answer, owner)
        if answer.body.stream:
            return self.follow(str(queued["id"]), headers=answer.headers)
        return JSONResponse(queued, headers=answer.headers)

    async def count_tokens(self, request: Request) -> Entry:
        """`POST /v1/responses/input_tokens`."""
        find = partial(self._store.find, owner=current_caller().key)
        tokens = await count_tokens(self._front, request, partial(read_responses_body, find))
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def find(self, response_id: str) -> StoredResponse:
        """A response of the caller. Raises ResponseNotFound."""
        stored = self._store.find(response_id, current_caller().key)
        if stored is None:
            raise ResponseNotFound(response_id)
        return stored

    def follow(
        self,
        response_id: str,
        after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """The events of a background response behind the one of a number, or all that are kept. A
        client that leaves does not end it. Raises InvalidArgument."""
        events = self._running.follow(response_id, after)
        ping_s = self._front.config.stream_ping_s
        return EventStream(events, encode_stream_error, lambda: None, ping_s, headers=headers)

    async def delete(self, response_id: str) -> Entry:
        """`DELETE /v1/responses/{id}`. A response that runs is cancelled."""
        owner = current_caller().key
        if not await asyncio.to_thread(self._store.delete, response_id, owner):
            raise ResponseNotFound(response_id)
        await self._running.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, response_id: str) -> Entry:
        """`POST /v1/responses/{id}/cancel`. One that has ended stays as it is."""
        stored = self.find(response_id)
        if not stored.content["background"]:
            raise InvalidArgument("", "only a response with background: true can be cancelled")
        if stored.running:
            await self._running.cancel(response_id)
        return self.find(response_id).content

    def _make_writer(
        self, owner: str, gateway: Gateway, call: ClientCall, body: ResponsesBody
    ) -> ResponseWriter:
        described = describe_response(call, call.model_name, body)
        items = AnswerItems.of(call.choices[0], gateway.text if body.scored else None)
        stores = body.store and not body.background
        keep: Callable[[Entry], None] = partial(self._keep, owner, body) if stores else _discard
        slow_end = body.scored or (stores and self._store.shared)
        return ResponseWriter(call, gateway.text, described, items, keep, slow_end)

    def _keep(self, owner: str, body: ResponsesBody, response: Entry) -> None:
        """Stores an ended response. If it cannot be stored, its client receives it nevertheless."""
        try:
            self._store.keep(StoredResponse(str(response["id"]), owner, response, body.inputs))
        except sqlite3.Error:
            log.exception("the response %s is not stored", response["id"])


def _discard(response: Entry) -> None:
    """A response that is not stored, or that `RunningResponses` stores."""


def _read_after(stream: str, starting_after: str) -> int | None:
    """The number of the event that a stream begins behind; None: no stream. Raises
    InvalidArgument."""
    streams = SWITCHES.get(stream.lower())
    if streams is None:
        raise InvalidArgument("stream", f"must be true or false, not {stream[:80]!r}")
    if not starting_after:
        return -1 if streams else None
    if not streams:
        raise InvalidArgument(STARTING_AFTER, "needs stream=true")
    if not (starting_after.isascii() and starting_after.isdigit()):
        raise InvalidArgument(STARTING_AFTER, "must be the sequence_number of an event")
    return int(starting_after[:MAX_NUMBER_DIGITS])
