"""The OpenAPI descriptions of bodies. The endpoints read their bodies themselves, bounded."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from gateway.faces.http.dialect.fields import FieldRule
from gateway.faces.http.schema import Body


def describe_body(kind: type[BaseModel], example: Mapping[str, object]) -> dict[str, Any]:
    """The description of a body, with the notes of its field table if it has one."""
    schema = kind.model_json_schema()
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
