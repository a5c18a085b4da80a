"""`/v1/embeddings`, `/v1/rerank` and `/score`, by a sentence encoder in a process of its own."""

import json
import time
from collections.abc import Callable
from typing import TypeVar
from uuid import uuid4

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from gateway.embeddings.text_encoder import Encoded, TextEncoder
from gateway.faces.http.body import parse_json, read_and_decode
from gateway.faces.http.describe import describe_body
from gateway.faces.http.embeddings.bodies import EmbeddingBody, RerankBody, ScoreBody
from gateway.faces.http.schema import validate_model
from gateway.front import Front
from gateway.types.errors import UnknownModel
from services.runtime.errors import InvalidArgument

BodyT = TypeVar("BodyT", EmbeddingBody, RerankBody, ScoreBody)
RERANK_PATHS = ("/rerank", "/v1/rerank", "/v2/rerank")
SCORE_PATHS = ("/score", "/v1/score")


def add_embeddings(app: FastAPI, front: Front) -> None:
    """Adds the endpoints unless the setting turns them off."""
    encoder = front.text_encoder
    if encoder is None:
        return

    @app.post(
        "/v1/embeddings",
        summary="Embeddings of texts",
        openapi_extra=describe_body(EmbeddingBody, {"input": "Hello"}),
    )
    async def embeddings(request: Request) -> Response:
        return await _embed(front, encoder, request)

    async def rerank(request: Request) -> Response:
        return await _rerank(front, encoder, request)

    async def score(request: Request) -> Response:
        return await _score(front, encoder, request)

    ranked = describe_body(RerankBody, {"query": "fruit", "documents": ["a pear", "a car"]})
    for path in RERANK_PATHS:
        app.post(path, summary="Documents by similarity to a query", openapi_extra=ranked)(rerank)
    scored = describe_body(ScoreBody, {"text_1": "a pear", "text_2": ["fruit", "a car"]})
    for path in SCORE_PATHS:
        app.post(path, summary="Similarity of pairs of texts", openapi_extra=scored)(score)


async def _embed(front: Front, encoder: TextEncoder, request: Request) -> Response:
    body = await _read(front, encoder, request, EmbeddingBody)
    encoded = await encoder.encode(body.encoding_format, body.texts(), "input", body.cuts)
    if body.dimensions not in (None, encoded.dimensions):
        raise InvalidArgument(
            "dimensions", f"this model's vectors have {encoded.dimensions}; remove the field"
        )
    rest = json.dumps({"model": encoder.name, "usage": _usage(encoded)})
    # The process has encoded the vectors: many would hold up the event loop.
    content = b'{"object": "list", "data": %b, %b' % (encoded.json, rest[1:].encode())
    return Response(content, media_type="application/json")


async def _rerank(front: Front, encoder: TextEncoder, request: Request) -> Response:
    body = await _read(front, encoder, request, RerankBody)
    _, *documents = texts = body.texts()
    encoded = await encoder.encode("ranks", texts, "documents", cut=True)
    scores: list[float] = json.loads(encoded.json)
    best = sorted(range(len(scores)), key=lambda at: -scores[at])[: body.top_n]
    shown: Callable[[int], dict[str, object]] = (
        (lambda at: {"document": {"text": documents[at]}})
        if body.return_documents
        else (lambda _: {})
    )
    results = [{"index": at, **shown(at), "relevance_score": scores[at]} for at in best]
    return JSONResponse(
        {
            "id": f"rerank-{uuid4().hex}",
            "model": encoder.name,
            "usage": _usage(encoded),
            "results": results,
        }
    )


async def _score(front: Front, encoder: TextEncoder, request: Request) -> Response:
    body = await _read(front, encoder, request, ScoreBody)
    encoded = await encoder.encode("scores", body.texts(), "text_2", cut=True)
    scores: list[float] = json.loads(encoded.json)
    data = [{"index": at, "object": "score", "score": each} for at, each in enumerate(scores)]
    return JSONResponse(
        {
            "id": f"score-{uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": encoder.name,
            "data": data,
            "usage": _usage(encoded),
        }
    )


async def _read(front: Front, encoder: TextEncoder, request: Request, kind: type[BodyT]) -> BodyT:
    """The body, which names the encoder or no model. Raises ServiceError."""

    def decode(raw: bytes) -> BodyT:
        given = {name: value for name, value in parse_json(raw).items() if value is not None}
        return validate_model(kind, given)

    body = await read_and_decode(front, request, decode)
    if body.model not in ("", encoder.name):
        raise UnknownModel(body.model[:256], encoder.name)
    return body


def _usage(encoded: Encoded) -> dict[str, int]:
    return {"prompt_tokens": encoded.tokens, "total_tokens": encoded.tokens}
