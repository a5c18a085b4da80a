"""The OpenAPI descriptions of bodies and errors. The endpoints read their bodies themselves,
bounded."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from gateway.faces.http.dialect.fields import FieldRule
from gateway.faces.http.errors import MESSAGES_PATH
from gateway.faces.http.schema import Body

Described = dict[str, Any]

COMPONENT = "#/components/schemas/{model}"
ERRORS = {
    "400": "The request is wrong; the error names the field",
    "401": "The API key is missing or unknown",
    "404": "There is no such object, model or endpoint",
    "429": "Too many requests wait, or a limit of the API key is reached",
    "503": "Nothing can serve the request now",
}
BODY_ERRORS = {
    "408": "The body arrived too slowly",
    "413": "The body is too large",
    "504": "The deadline has passed",
}
_TEXT = {"type": "string"}
ERROR_SCHEMAS: Mapping[str, Described] = {
    "OpenAIError": {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": "object",
                "required": ["message", "type", "param", "code"],
                "properties": {
                    "message": _TEXT,
                    "type": _TEXT,
                    "param": {"type": ["string", "null"], "description": "The wrong field."},
                    "code": {"type": ["string", "null"]},
                },
            }
        },
    },
    "AnthropicError": {
        "type": "object",
        "required": ["type", "error", "request_id"],
        "properties": {
            "type": {"const": "error"},
            "error": {
                "type": "object",
                "required": ["type", "message"],
                "properties": {"type": _TEXT, "message": _TEXT},
            },
            "request_id": _TEXT,
        },
    },
}


def describe_content(*media_types: str) -> dict[int | str, Described]:
    """The description of an answer with content of these types, beside JSON."""
    return {200: {"content": {media_type: {} for media_type in media_types}}}


STREAMED = describe_content("text/event-stream")  # of an answer with `stream`


def complete_description(document: Described) -> Described:
    """An OpenAPI document with the errors of each operation, and with the parts of bodies where
    their references point. FastAPI describes errors of its own, which no endpoint has."""
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    schemas.clear()
    schemas |= ERROR_SCHEMAS
    for path, operations in document["paths"].items():
        schema = "AnthropicError" if path.startswith(MESSAGES_PATH) else "OpenAIError"
        content = {"application/json": {"schema": {"$ref": COMPONENT.format(model=schema)}}}
        for operation in operations.values():
            body = operation.get("requestBody", {}).get("content", {})
            for described in body.values():
                schemas |= described["schema"].pop("$defs", {})
            given = operation["responses"]
            given.pop("422", None)
            for status, sentence in (ERRORS | (BODY_ERRORS if body else {})).items():
                given.setdefault(status, {"description": sentence, "content": content})
    return document


def describe_body(kind: type[BaseModel], example: Mapping[str, object]) -> Described:
    """The description of a body, with the notes of its field table if it has one."""
    schema = kind.model_json_schema(ref_template=COMPONENT)
    if issubclass(kind, Body):
        schema["properties"] = _select_properties(schema["properties"], kind.fields)
    content = {"schema": schema, "example": example}
    return {"requestBody": {"content": {"application/json": content}, "required": True}}


def _select_properties(
    properties: Mapping[str, Any], rules: Mapping[str, FieldRule]
) -> dict[str, Any]:
    """The properties that the endpoint has; others are those of its base class."""
    selected = {name: described for name, described in properties.items() if name in rules}
    for name, described in selected.items():
        if rules[name].note:
            described["description"] = rules[name].note
    return selected
