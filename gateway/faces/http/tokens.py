"""`/tokenize` and `/detokenize`, as vLLM has them."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from fastapi import Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from gateway.faces.http.answers.sse import until_disconnect
from gateway.faces.http.body import parse_json, read_in_turn
from gateway.faces.http.schema import ChatBody, CompletionBody, Json, read_body, validated
from gateway.gateway import Gateway
from protos.generated import gateway_pb2
from services.runtime.errors import InvalidArgument

OWN = frozenset(("return_token_strs",))  # not a prompt's
TOKEN_BYTES = 8  # of an id in JSON, about


class TokenizeBody(BaseModel):
    """Either a prompt or messages, as the endpoints that answer them take them."""

    model_config = ConfigDict(strict=True, extra="allow")

    model: str = ""
    prompt: str | None = None
    messages: list[object] | None = None
    return_token_strs: bool = False  # the tokens' spellings in the vocabulary, too


class DetokenizeBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    model: str = ""
    tokens: list[Annotated[int, Field(ge=0, lt=2**32)]]


async def tokenize(gateway: Gateway, request: Request) -> JSONResponse:
    """`POST /tokenize`: what a prompt or conversation becomes, however long it is."""
    body, asked, unknown = await read_in_turn(gateway, request, _understand)
    gateway.unknown_fields.pass_over(unknown, TokenizeBody.model_fields.keys())
    gateway.check_model(body.model)
    tokens = await until_disconnect(request.receive, gateway.tokenize(asked))
    answer: dict[str, object] = {
        "count": len(tokens),
        "max_model_len": gateway.max_context_tokens,
        "tokens": list(tokens),
        "token_strs": None,
    }
    if body.return_token_strs:
        spelling = partial(_spell, gateway, tokens)
        answer["token_strs"] = await gateway.read(spelling, TOKEN_BYTES * len(tokens))
    return JSONResponse(answer)


async def detokenize(gateway: Gateway, request: Request) -> JSONResponse:
    """`POST /detokenize`: the text of tokens, special ones among them."""
    body = await read_in_turn(gateway, request, _read_tokens)
    gateway.check_model(body.model)
    size = gateway.text.vocabulary_tokens
    if body.tokens and max(body.tokens) >= size:
        fault = f"token id {max(body.tokens)} is outside the vocabulary of {size}"
        raise InvalidArgument("tokens", fault)
    decoding = partial(_decode, gateway, body.tokens)
    work = gateway.read(decoding, TOKEN_BYTES * len(body.tokens))
    return JSONResponse({"prompt": await until_disconnect(request.receive, work)})


def _understand(raw: bytes) -> tuple[TokenizeBody, gateway_pb2.GenerateRequest, Sequence[str]]:
    fields = parse_json(raw)
    body = validated(TokenizeBody, _given(fields))
    if (body.prompt is None) == (body.messages is None):
        raise InvalidArgument("prompt", "give a prompt or messages, and not both")
    left = {name: value for name, value in fields.items() if name not in OWN}
    given: CompletionBody | ChatBody = (
        read_body(CompletionBody, left) if body.messages is None else read_body(ChatBody, left)
    )
    (asked,) = given.requests()
    return body, asked, given.unknown


def _read_tokens(raw: bytes) -> DetokenizeBody:
    return validated(DetokenizeBody, _given(parse_json(raw)))


def _given(fields: Json) -> Json:
    """But for those that are null."""
    return {name: value for name, value in fields.items() if value is not None}


def _spell(gateway: Gateway, tokens: Sequence[int]) -> list[str]:
    spelled = gateway.text.backend.id_to_token
    return [spelled(token) or "" for token in tokens]


def _decode(gateway: Gateway, tokens: Sequence[int]) -> str:
    """A batch of one: other threads go on meanwhile, as they don't beside `decode`."""
    (text,) = gateway.text.backend.decode_batch([tokens], skip_special_tokens=False)
    return str(text)
