"""`/v1/messages` and `/v1/messages/count_tokens`: Anthropic's API."""

from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from gateway.faces.http.answers.items import AnswerItems
from gateway.faces.http.describe import STREAMED, describe_body
from gateway.faces.http.errors import MESSAGES_PATH
from gateway.faces.http.generate import GenerationEndpoint, generate
from gateway.faces.http.hot_paths import Endpoints
from gateway.faces.http.messages.body import CountBody, MessagesBody, read_messages_body
from gateway.faces.http.messages.writer import MessageWriter
from gateway.faces.http.tokens import count_tokens
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.sessions.call import ClientCall
from observability import genai

COUNT_PATH = f"{MESSAGES_PATH}/count_tokens"
CONVERSATION = {"messages": [{"role": "user", "content": "Hello"}]}


def add_messages(app: FastAPI, front: Front) -> Endpoints:
    """Returns those that are asked often."""
    described = describe_body(MessagesBody, {**CONVERSATION, "max_tokens": 64})

    @app.post(
        MESSAGES_PATH,
        summary="Answer an Anthropic conversation",
        openapi_extra=described,
        responses=STREAMED,
    )
    async def messages(request: Request) -> Response:
        return await generate(front, request, MESSAGES)

    counted = describe_body(CountBody, CONVERSATION)

    @app.post(COUNT_PATH, summary="The tokens of an Anthropic conversation", openapi_extra=counted)
    async def counted_tokens(request: Request) -> Response:
        tokens = await count_tokens(front, request, partial(read_messages_body, CountBody))
        return JSONResponse({"input_tokens": tokens})

    return {("POST", MESSAGES_PATH): messages}


def _write_message(gateway: Gateway, call: ClientCall, body: MessagesBody) -> MessageWriter:
    return MessageWriter(call, call.model_name, AnswerItems.of(call.choices[0]))


MESSAGES = GenerationEndpoint(partial(read_messages_body, MessagesBody), _write_message, genai.CHAT)
