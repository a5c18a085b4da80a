"""`/v1/responses`: OpenAI's API with items, typed events and stored conversations."""

import asyncio
import logging
import sqlite3
from collections.abc import Callable
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from gateway.admission.caller import current_caller
from gateway.faces.http.answers.items import AnswerItems
from gateway.faces.http.describe import describe_body
from gateway.faces.http.errors import internal_error
from gateway.faces.http.generate import GenerationEndpoint, OpenAnswer, open_answer
from gateway.faces.http.hot_paths import Endpoints
from gateway.faces.http.responses.body import ResponsesBody, read_responses_body
from gateway.faces.http.responses.errors import ResponseNotFound
from gateway.faces.http.responses.items import Entry, decode_input
from gateway.faces.http.responses.store import ResponseStore, StoredResponse
from gateway.faces.http.responses.writer import (
    ResponseWriter,
    describe_response,
    with_error,
    with_status,
)
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.sessions.call import ClientCall
from observability import genai
from services.runtime.errors import InvalidArgument, ServiceError
from services.runtime.tasks import run_to_completion

log = logging.getLogger(__name__)

WATCH_S = 0.2
RESPONSES_PATH = "/v1/responses"
NO_STREAM = ("false", "0", "")
CUT_CALL = ("function_call", "incomplete")
EXAMPLE = {"input": "Hello"}


def add_responses(app: FastAPI, front: Front) -> Endpoints:
    """Returns those that are asked often."""
    api = ResponsesApi(front)
    described = describe_body(ResponsesBody, EXAMPLE)

    @app.post(RESPONSES_PATH, summary="Answer an input of items", openapi_extra=described)
    async def create(request: Request) -> Response:
        return await api.create(request)

    @app.get(RESPONSES_PATH + "/{response_id}", summary="A stored response")
    async def retrieve(response_id: str, stream: str = "false") -> Response:
        if stream.lower() not in NO_STREAM:
            raise InvalidArgument("stream", "is not available for a stored response; poll it")
        return JSONResponse(api.find(response_id).content)

    @app.delete(RESPONSES_PATH + "/{response_id}", summary="Delete a stored response")
    async def delete(response_id: str) -> Response:
        return JSONResponse(await api.delete(response_id))

    @app.post(RESPONSES_PATH + "/{response_id}/cancel", summary="Cancel a background response")
    async def cancel(response_id: str) -> Response:
        return JSONResponse(await api.cancel(response_id))

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
        if self._store.shared:
            front.background.companion = self._watch

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
            queued = await self._start(answer, owner)
        return JSONResponse(queued, headers=answer.headers)

    def find(self, response_id: str) -> StoredResponse:
        """A response of the caller. Raises ResponseNotFound."""
        stored = self._store.find(response_id, current_caller().key)
        if stored is None:
            raise ResponseNotFound(response_id)
        return stored

    async def delete(self, response_id: str) -> Entry:
        """`DELETE /v1/responses/{id}`. A response that runs is cancelled."""
        owner = current_caller().key
        if not await asyncio.to_thread(self._store.delete, response_id, owner):
            raise ResponseNotFound(response_id)
        await self._front.background.cancel(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    async def cancel(self, response_id: str) -> Entry:
        """`POST /v1/responses/{id}/cancel`. One that has ended stays as it is."""
        stored = self.find(response_id)
        if not stored.content["background"]:
            raise InvalidArgument("", "only a response with background: true can be cancelled")
        if stored.running and not await self._front.background.cancel(response_id):
            await asyncio.to_thread(self._store.cancel, response_id)  # it runs in another process
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
            self._store.keep(_ended(owner, response, body))
        except sqlite3.Error:
            log.exception("the response %s is not stored", response["id"])

    async def _start(self, answer: OpenAnswer[ResponsesBody], owner: str) -> Entry:
        """Runs an answer in the background; returns the response as of now."""
        described = describe_response(answer.call, answer.call.model_name, answer.body)
        response_id, running = str(described["id"]), with_status(described, "in_progress")
        background = self._front.background
        background.check_room()
        stored = StoredResponse(response_id, owner, running, (), running=True)
        await asyncio.to_thread(self._store.keep, stored)
        try:
            background.start(response_id, partial(self._run, answer, owner, described))
        except ServiceError:
            await asyncio.to_thread(self._store.delete, response_id, owner)
            raise
        return with_status(described, "queued")

    async def _watch(self) -> None:
        """Ends the responses that other processes cancel or delete, while there are some."""
        background = self._front.background
        while names := background.names:
            await asyncio.sleep(WATCH_S)
            for name in names - self._store.wanted():
                await background.cancel(name)

    async def _run(self, answer: OpenAnswer[ResponsesBody], owner: str, described: Entry) -> None:
        response = with_status(described, "cancelled")
        try:
            with answer.ends_on_error():
                response = await answer.collect()
                answer.call.on_whole_sent()
            answer.end()
        except ServiceError as error:
            response = with_error(described, error)
        except Exception:
            log.exception("a background response failed")
            response = with_error(described, internal_error())
        finally:
            ended = _ended(owner, response, answer.body)
            await run_to_completion(asyncio.to_thread(self._store.finish, ended))


def _discard(response: Entry) -> None:
    """A response that is not stored, or that `_run` stores."""


def _ended(owner: str, response: Entry, body: ResponsesBody) -> StoredResponse:
    """What is stored of a response. Its output is part of the conversation, except for calls that
    a limit has cut."""
    output = response["output"]
    assert isinstance(output, list)
    said = [each for each in output if (each["type"], each["status"]) != CUT_CALL]
    conversation = [*body.conversation, *decode_input(said, "output")]
    return StoredResponse(str(response["id"]), owner, response, conversation)
