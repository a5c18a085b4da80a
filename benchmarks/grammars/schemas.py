"""JSON schemas as applications send them: API objects, configuration, unions, recursion."""

from collections.abc import Iterator, Mapping

Schema = Mapping[str, object]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1, "maxLength": 60}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 100_000}
AMOUNT: Schema = {"type": "number", "minimum": 0}
RATE: Schema = {"type": "number", "minimum": 0, "maximum": 1}
FLAG: Schema = {"type": "boolean"}
WORDS: Schema = {"type": "array", "items": NAME, "maxItems": 8}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}


def _format(name: str) -> Schema:
    return {"type": "string", "format": name}


def _pattern(pattern: str) -> Schema:
    return {"type": "string", "pattern": pattern}


def _of(*values: object) -> Schema:
    return {"enum": [*values]}


def _list(items: Schema, **limits: object) -> Schema:
    return {"type": "array", "items": items, **limits}


def _object(optional: str = "", /, **properties: Schema) -> Schema:
    required = [name for name in properties if name != optional]
    closed = {"type": "object", "properties": properties, "additionalProperties": False}
    return {**closed, "required": required}


ADDRESS = _object("street", street=NAME, city=NAME, postcode=_pattern("^[0-9]{5}$"),
                  country=_pattern("^[A-Z]{2}$"))  # fmt: skip
ENTITIES: Mapping[str, Schema] = {
    "user": _object("phone", id=_format("uuid"), email=_format("email"), name=NAME,
                    phone=_pattern(r"^\+?[0-9 ()-]{6,20}$"), created=_format("date-time"),
                    role=_of("admin", "editor", "viewer"), address=ADDRESS),
    "order": _object("note", number=_pattern("^ORD-[0-9]{6}$"), total=AMOUNT, note=TEXT,
                     lines=_list(_object(sku=_pattern("^[A-Z]{3}-[0-9]{4}$"), quantity=COUNT,
                                         price=AMOUNT), minItems=1, maxItems=50)),
    "event": _object(title=NAME, start=_format("date-time"), minutes=_of(15, 30, 45, 60),
                     attendees=_list(_format("email"), maxItems=20), online=FLAG),
    "service": _object("labels", image=_pattern("^[a-z0-9./-]+:[a-z0-9.-]+$"), replicas=COUNT,
                       labels=LABELS, ports=_list({"type": "integer", "minimum": 1,
                                                   "maximum": 65_535}), host=_format("hostname")),
    "log": _object(time=_format("date-time"), level=_of("debug", "info", "warning", "error"),
                   source=_format("ipv4"), message=TEXT, fields=LABELS),
    "product": _object("sizes", name=NAME, price=AMOUNT, sizes=WORDS, rating=RATE,
                       url=_format("uri"), stock=COUNT, released=_format("date")),
    "place": _object(name=NAME, at={"type": "array", "prefixItems": [
        {"type": "number", "minimum": -180, "maximum": 180},
        {"type": "number", "minimum": -90, "maximum": 90}], "items": False, "minItems": 2}),
    "answer": _object(reasoning=TEXT, answer=_of("yes", "no", "unknown"), confidence=RATE,
                      sources=_list(_format("uri"), maxItems=5)),
    "review": _object("comment", stars={"type": "integer", "minimum": 1, "maximum": 5},
                      sentiment=_of("positive", "neutral", "negative"), topics=WORDS,
                      comment={"type": ["string", "null"], "maxLength": 400}),
    "call": _object(city=NAME, unit=_of("celsius", "fahrenheit"), days={
        "type": "integer", "minimum": 1, "maximum": 14}),
}  # fmt: skip
NODE: Schema = {"$ref": "#/$defs/node"}
RECURSIVE: Mapping[str, Schema] = {
    "tree": _object(name=NAME, children=_list(NODE)),
    "linked list": _object("next", value=COUNT, next=NODE),
    "expression": {"anyOf": [AMOUNT, _object(op=_of("+", "-", "*", "/"), left=NODE, right=NODE)]},
    "comments": _object(author=NAME, text=TEXT, replies=_list(NODE, maxItems=10)),
    "files": {"anyOf": [_object(kind={"const": "file"}, bytes=COUNT),
                        _object(kind={"const": "folder"}, entries=_list(NODE))]},
}  # fmt: skip
OTHERS: Mapping[str, Schema] = {
    "any object": {"type": "object"},
    "translations": {"type": "object", "patternProperties": {"^[a-z]{2}(-[A-Z]{2})?$": TEXT},
                     "additionalProperties": False},
    "matrix": _list(_list({"type": "number"}, minItems=3, maxItems=3), minItems=3, maxItems=3),
    "wide": _object(**{f"field_{at}": (COUNT, TEXT, FLAG)[at % 3] for at in range(60)}),
    "categories": _object(category=_of(*(f"category {at}" for at in range(300)))),
    "cents": _object(amount={"type": "number", "multipleOf": 0.01}, step={
        "type": "integer", "multipleOf": 5, "minimum": 0}),
    "tags, unique": _object(tags={**WORDS, "uniqueItems": True}),
    "not empty": _object(name={"type": "string", "not": {"const": ""}}),
    "card or account": {"type": "object", "properties": {"card": TEXT, "account": TEXT},
                        "dependentRequired": {"card": ["account"]}},
    "conditional": {"type": "object", "properties": {"kind": TEXT},
                    "if": {"properties": {"kind": {"const": "a"}}}, "then": {"required": ["x"]}},
    "contains": _list(COUNT, contains={"const": 1}),
    "credit card": _object(number=_format("credit-card")),
}  # fmt: skip


def make_schemas() -> Iterator[tuple[str, Schema]]:
    """51 schemas with their names."""
    for name, entity in ENTITIES.items():
        yield name, entity
        yield f"{name}, list", _object(items=_list(entity, maxItems=20), total=COUNT)
        yield (
            f"{name}, result",
            {
                "$defs": {"data": entity},
                "oneOf": [
                    _object(ok={"const": True}, data={"$ref": "#/$defs/data"}),
                    _object(ok={"const": False}, error=_object(code=COUNT, message=TEXT)),
                ],
            },
        )
    yield "union", {"anyOf": [*ENTITIES.values()]}
    yield from ((name, {"$defs": {"node": node}, **NODE}) for name, node in RECURSIVE.items())
    yield from OTHERS.items()
    open_fields = {key: value for key, value in ADDRESS.items() if key != "additionalProperties"}
    yield "address, open", open_fields
    yield "addresses, open", _list(open_fields)
    yield (
        "settings",
        _object(**{name: {"anyOf": [each, {"type": "null"}]} for name, each in ENTITIES.items()}),
    )
