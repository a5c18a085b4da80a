"""Constraints on answers in HTTP bodies: OpenAI's, vLLM's and SGLang's fields for them.

Types are checked here. Whether a constraint can be enforced is found when it is compiled.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import cast

from gateway.types.constraint import JSON_OBJECT, Constraint, ConstraintKind
from services.runtime.errors import InvalidArgument

Reader = Callable[[str, object], Constraint | None]
MAX_CHOICES = 10_000


def read_constraint(fields: Mapping[str, object]) -> Constraint | None:
    """The one constraint of a body, or None. Raises InvalidArgument naming the field."""
    given = [
        constraint
        for name, read in READERS.items()
        if (value := fields.get(name)) is not None and (constraint := read(name, value)) is not None
    ]
    if len(given) > 1:
        first, second = given[0].field_name, given[1].field_name
        raise InvalidArgument(second, f"{first} constrains the answer, too; remove one of them")
    return given[0] if given else None


def read_text_format(name: str, value: object) -> Constraint | None:
    """The constraint of `text.format` of a response. Raises InvalidArgument."""
    return _read_format(TEXT_FORMATS, name, value)


def _read_response_format(name: str, value: object) -> Constraint | None:
    return _read_format(FORMATS, name, value)


def _read_format(formats: Mapping[str, Reader], name: str, value: object) -> Constraint | None:
    given = _require_object(name, value)
    kind = given.get("type")
    read = formats.get(kind) if isinstance(kind, str) else None
    if read is None:
        raise InvalidArgument(f"{name}.type", f"must be one of {', '.join(formats)}, not {kind!r}")
    return read(name, {key: inner for key, inner in given.items() if key != "type"})


def _read_text(name: str, value: object) -> None:
    _allow(name, _require_object(name, value))


def _read_json_object(name: str, value: object) -> Constraint:
    _allow(name, _require_object(name, value))
    return Constraint(ConstraintKind.JSON_SCHEMA, JSON_OBJECT, field_name=name)


def _read_json_schema_format(name: str, value: object) -> Constraint:
    """OpenAI's rules for `strict` are not demanded: every schema is enforced as it is."""
    given = _require_object(name, value)
    _allow(name, given, "json_schema")
    return _read_named_schema(f"{name}.json_schema", given.get("json_schema"))


def _read_named_schema(name: str, value: object) -> Constraint:
    given = _require_object(name, value)
    _allow(name, given, "name", "description", "schema", "strict")
    if given.get("schema") is None:
        raise InvalidArgument(f"{name}.schema", "is missing")
    return read_schema(f"{name}.schema", given["schema"])


def _read_structured_outputs(name: str, value: object) -> Constraint | None:
    given = _require_object(name, value)
    _allow(name, given, *STRUCTURED, *WHITESPACE_OPTIONS)
    found = [key for key in STRUCTURED if given.get(key) not in (None, False)]
    if len(found) > 1:
        raise InvalidArgument(name, f"{found[0]} and {found[1]} are given; remove one of them")
    whitespace = _read_whitespace(name, given)
    if not found:
        return None
    constraint = STRUCTURED[found[0]](f"{name}.{found[0]}", given[found[0]])
    return constraint and replace(constraint, whitespace=whitespace)


def _read_whitespace(name: str, given: Mapping[str, object]) -> str | None:
    pattern = given.get("whitespace_pattern")
    if given.get("disable_additional_properties"):
        sentence = "is not supported; set additionalProperties to false in the schema"
        raise InvalidArgument(f"{name}.disable_additional_properties", sentence)
    if given.get("disable_any_whitespace"):
        return ""
    return None if pattern is None else _require_text(f"{name}.whitespace_pattern", pattern)


def read_schema(name: str, value: object) -> Constraint:
    """A constraint by a schema, an object or JSON text. Raises InvalidArgument with `name`."""
    value = _decode_text(name, value)
    if not isinstance(value, dict | bool):
        raise InvalidArgument(name, "must be a JSON schema: an object")
    return Constraint(ConstraintKind.JSON_SCHEMA, _dump(value), field_name=name)


def _read_regex(name: str, value: object) -> Constraint:
    return Constraint(ConstraintKind.REGEX, _require_text(name, value), field_name=name)


def _read_grammar(name: str, value: object) -> Constraint:
    return Constraint(ConstraintKind.GRAMMAR, _require_text(name, value), field_name=name)


def _read_choice(name: str, value: object) -> Constraint:
    texts = isinstance(value, list) and all(isinstance(each, str) for each in value)
    if not texts or not value:
        raise InvalidArgument(name, "must be a list of strings, at least one")
    choices = list(dict.fromkeys(cast(Sequence[str], value)))
    if len(choices) > MAX_CHOICES:
        raise InvalidArgument(name, f"at most {MAX_CHOICES} choices, got {len(choices)}")
    return Constraint(ConstraintKind.CHOICE, _dump(choices), field_name=name)


def _read_tag(name: str, value: object) -> Constraint:
    """Structural tags, as an object or as JSON text: a format of XGrammar's, or the older
    `structures` and `triggers`, which are one."""
    given = dict(_require_object(name, _decode_text(name, value)))
    given.pop("type", None)
    if "format" in given:
        _allow(name, given, "format")
        format = _require_object(f"{name}.format", given["format"])
        kind = ConstraintKind.STRUCTURAL_TAG
        return Constraint(kind, _dump(format), field_name=f"{name}.format")
    _allow(name, given, "structures", "triggers")
    if not given:
        raise InvalidArgument(f"{name}.format", "is missing")
    triggers, structures = given.get("triggers"), given.get("structures")
    if not isinstance(triggers, list) or not all(isinstance(t, str) and t for t in triggers):
        raise InvalidArgument(f"{name}.triggers", "must be a list of strings that are not empty")
    if not isinstance(structures, list) or not structures:
        raise InvalidArgument(f"{name}.structures", "must be a list, at least of one structure")
    for at, structure in enumerate(structures):
        _check_structure(f"{name}.structures[{at}]", structure, triggers)
    tags = [_make_tag(structure) for structure in structures]
    source = _dump({"type": "triggered_tags", "triggers": triggers, "tags": tags})
    return Constraint(ConstraintKind.STRUCTURAL_TAG, source, field_name=name)


def _make_tag(structure: Mapping[str, object]) -> Mapping[str, object]:
    content = {"type": "json_schema", "json_schema": structure.get("schema") or {}}
    return {"begin": structure["begin"], "content": content, "end": structure["end"]}


def _check_structure(name: str, value: object, triggers: Sequence[str]) -> None:
    given = _require_object(name, value)
    _allow(name, given, "begin", "schema", "end")
    begin = _require_text(f"{name}.begin", given.get("begin"))
    if not isinstance(given.get("end"), str):
        raise InvalidArgument(f"{name}.end", "must be a string")
    if not begin.startswith(tuple(triggers)):
        raise InvalidArgument(f"{name}.begin", "must start with one of the triggers")
    if not isinstance(given.get("schema"), dict | None):
        raise InvalidArgument(f"{name}.schema", "must be an object")


STRUCTURED: Mapping[str, Reader] = {
    "json": read_schema,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
    "structural_tag": _read_tag,
    "json_object": lambda name, _: Constraint(
        ConstraintKind.JSON_SCHEMA, JSON_OBJECT, field_name=name
    ),
}
WHITESPACE_OPTIONS = (
    "whitespace_pattern",
    "disable_any_whitespace",
    "disable_additional_properties",
)
FORMATS: Mapping[str, Reader] = {
    "text": _read_text,
    "json_object": _read_json_object,
    "json_schema": _read_json_schema_format,
    "structural_tag": _read_tag,
}
# A response's format has the fields of its schema beside the type.
TEXT_FORMATS: Mapping[str, Reader] = {
    "text": _read_text,
    "json_object": _read_json_object,
    "json_schema": _read_named_schema,
}
READERS: Mapping[str, Reader] = {
    "response_format": _read_response_format,
    "structured_outputs": _read_structured_outputs,
    "guided_json": read_schema,
    "guided_regex": _read_regex,
    "guided_choice": _read_choice,
    "guided_grammar": _read_grammar,
    "json_schema": read_schema,
    "regex": _read_regex,
    "ebnf": _read_grammar,
}


def _decode_text(name: str, value: object) -> object:
    """The value that a string holds as JSON; any other value as it is."""
    if not isinstance(value, str):
        return value
    try:
        decoded: object = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(name, f"is not valid JSON: {error}") from None
    return decoded


def _require_object(name: str, value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise InvalidArgument(name, "is missing" if value is None else "must be an object")
    return value


def _require_text(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(name, "must be a string that is not empty")
    return value


def _allow(name: str, given: Mapping[str, object], *keys: str) -> None:
    """Raises InvalidArgument for a key that would be ignored."""
    unknown = next((key for key in given if key not in keys and given[key] is not None), None)
    if unknown is not None:
        raise InvalidArgument(f"{name}.{unknown[:80]}", "is not a field of it; remove it")


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
