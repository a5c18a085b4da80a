"""`/v1/load_lora_adapter` and `/v1/unload_lora_adapter`, as in vLLM."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from gateway.config import MAX_NAME_CHARS
from gateway.faces.http.body import parse_json, read_and_decode
from gateway.faces.http.describe import describe_body
from gateway.faces.http.schema import validate_model
from gateway.front import Front
from services.runtime.errors import Code, InvalidArgument, ServiceError

MAX_PATH_CHARS = 4_096
FORBIDDEN = (
    "clients may not load or unload adapters here: set gateway.adapter_loading=true, or start with "
    "--lora-modules NAME=FOLDER"
)


class UnloadBody(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    lora_name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    lora_int_id: int | None = None  # of vLLM, unused
    model: str = ""  # the base model; empty: the first one


class LoadBody(UnloadBody):
    lora_path: str = Field(min_length=1, max_length=MAX_PATH_CHARS)


BodyT = TypeVar("BodyT", bound=UnloadBody)


def add_adapters(app: FastAPI, front: Front) -> None:
    async def read(request: Request, kind: type[BodyT]) -> BodyT:
        if not front.config.adapter_loading:
            raise InvalidArgument("", FORBIDDEN)
        return await read_and_decode(
            front, request, lambda raw: validate_model(kind, parse_json(raw))
        )

    loaded = describe_body(LoadBody, {"lora_name": "sql", "lora_path": "/models/sql"})

    @app.post(
        "/v1/load_lora_adapter",
        summary="Load a LoRA adapter on all workers of a model",
        openapi_extra=loaded,
        response_class=PlainTextResponse,
    )
    async def load(request: Request) -> PlainTextResponse:
        body = await read(request, LoadBody)
        name = body.lora_name
        if name in front.gateways:
            raise InvalidArgument("lora_name", f"{name!r} is the name of a served model")
        if name != name.strip():
            raise InvalidArgument("lora_name", "a name has no blanks around it")
        gateway = front.select(body.model)
        if any(name in each.adapters for each in front.gateways.values() if each is not gateway):
            raise InvalidArgument("lora_name", f"another model has an adapter {name!r}")
        with _named_fields():
            await gateway.load_adapter(name, body.lora_path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post(
        "/v1/unload_lora_adapter",
        summary="Unload a LoRA adapter",
        openapi_extra=describe_body(UnloadBody, {"lora_name": "sql"}),
        response_class=PlainTextResponse,
    )
    async def unload(request: Request) -> PlainTextResponse:
        body = await read(request, UnloadBody)
        name = body.lora_name
        gateway = front.select(body.model or (name if name not in front.gateways else ""))
        await gateway.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


@contextmanager
def _named_fields() -> Iterator[None]:
    """Names the field of the body that the scheduler refuses."""
    try:
        yield
    except ServiceError as error:
        field, colon, sentence = error.message.partition(": ")
        if error.code is not Code.INVALID_ARGUMENT or not colon or field not in ("name", "path"):
            raise
        raise InvalidArgument(f"lora_{field}", sentence) from None
