"""`/tokenize` and `/detokenize`, as in vLLM, and the number of tokens of any body's prompt."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from gateway.faces.http.answers.sse import run_until_disconnect
from gateway.faces.http.body import parse_json, read_and_decode
from gateway.faces.http.generate import BodyT
from gateway.faces.http.schema import ChatBody, CompletionBody, Json, read_body, validate_model
from gateway.front import Front
from gateway.gateway import Gateway
from gateway.types.client_request import ClientRequest
from services.runtime.errors import InvalidArgument

OWN_FIELDS = frozenset(("return_token_strs",))  # not fields of a completion or chat
TOKEN_BYTES = 8  # approximate size of a token id in JSON


class TokenizeBody(BaseModel):
    """A prompt or messages, with the same fields as for the endpoints that answer them."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str = ""
    prompt: str | None = None
    messages: list[object] | None = None
    return_token_strs: bool = False  # return the tokens' strings in the vocabulary, too


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    tokens: list[Annotated[int, Field(ge=0, lt=2**32)]]


async def tokenize(front: Front, request: Request) -> JSONResponse:
    """`POST /tokenize`: the tokens of a prompt or conversation of any length."""
    body, client_request, unknown = await read_and_decode(front, request, _decode_tokenize)
    front.unknown_fields.handle(unknown, TokenizeBody.model_fields.keys())
    gateway = front.select(body.model)
    tokens = await run_until_disconnect(request.receive, gateway.intake.tokenize(client_request))
    answer: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": gateway.max_context_tokens,
        "tokens": list(tokens),
        "token_strs": None,
    }
    if body.return_token_strs:
        spelling = partial(_lookup_strings, gateway, tokens)
        answer["token_strs"] = await gateway.intake.read(spelling, TOKEN_BYTES * len(tokens))
    return JSONResponse(answer)


async def count_tokens(front: Front, request: Request, read: Callable[[Json], BodyT]) -> int:
    """The tokens of the prompt of a body that `read` reads; none is generated."""

    def decode(raw: bytes) -> tuple[BodyT, ClientRequest]:
        body = read(parse_json(raw))
        (client_request,) = body.client_requests()
        return body, client_request

    body, client_request = await read_and_decode(front, request, decode)
    front.unknown_fields.handle(body.unknown, body.fields.keys())
    gateway = front.select(body.model)
    return len(await run_until_disconnect(request.receive, gateway.intake.tokenize(client_request)))


async def detokenize(front: Front, request: Request) -> JSONResponse:
    """`POST /detokenize`: the text of tokens, including special tokens."""
    body = await read_and_decode(front, request, _decode_detokenize)
    gateway = front.select(body.model)
    size = gateway.text.vocabulary_tokens
    if body.tokens and max(body.tokens) >= size:
        fault = f"token id {max(body.tokens)} is outside the vocabulary of {size}"
        raise InvalidArgument("tokens", fault)
    decoding = partial(_decode_text, gateway, body.tokens)
    work = gateway.intake.read(decoding, TOKEN_BYTES * len(body.tokens))
    return JSONResponse({"prompt": await run_until_disconnect(request.receive, work)})


def _decode_tokenize(raw: bytes) -> tuple[TokenizeBody, ClientRequest, Sequence[str]]:
    fields = parse_json(raw)
    body = validate_model(TokenizeBody, _drop_nulls(fields))
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("prompt", "give either a prompt or messages, not both")
    rest = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
    prompted: CompletionBody | ChatBody = (
        read_body(CompletionBody, rest) if body.messages is None else read_body(ChatBody, rest)
    )
    (client_request,) = prompted.client_requests()
    return body, client_request, prompted.unknown


def _decode_detokenize(raw: bytes) -> DetokenizeBody:
    return validate_model(DetokenizeBody, _drop_nulls(parse_json(raw)))


def _drop_nulls(fields: Json) -> Json:
    return {name: value for name, value in fields.items() if value is not None}


def _lookup_strings(gateway: Gateway, tokens: Sequence[int]) -> list[str]:
    lookup = gateway.text.backend.id_to_token
    return [lookup(token) or "" for token in tokens]


def _decode_text(gateway: Gateway, tokens: Sequence[int]) -> str:
    """Uses a batch of one because `decode_batch`, unlike `decode`, releases the GIL."""
    (text,) = gateway.text.backend.decode_batch([tokens], skip_special_tokens=False)
    return str(text)
