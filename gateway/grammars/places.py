"""Finds the place in a JSON schema that an error of llguidance speaks of. Pure.

llguidance names the keyword or the value, not where it is.
"""

import json
import re
from collections.abc import Iterator
from urllib.parse import unquote

# Keywords with schemas: one, a list of them, or a name for each.
ONE = frozenset(
    ("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else",
     "propertyNames", "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
LISTED = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
MAX_DEPTH = 200  # of the walk; llguidance reads JSON of at most 128 levels

UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
QUOTING = (  # an error that quotes the value of a keyword
    ("format", re.compile(r"Unknown format: (.*)")),
    ("type", re.compile(r"Invalid type: (.*)")),
    ("$ref", re.compile(r"Pointer '(.*)' does not exist")),
    ("$ref", re.compile(r"Resource '(.*?)' is not present")),
    ("$schema", re.compile(r"Resource '(.*?)' is not present")),
)
NAMING = re.compile(r" for '([A-Za-z]+)'")  # an error that names a keyword
SPEAKING_OF = (  # an error that speaks of one keyword
    ("patternProperties", "patternProperty regexes"),
    ("oneOf", "oneOf constraints are not supported"),
    ("pattern", "regex parse error"),
)


def find_place(schema: object, error: str) -> str:
    """JSON pointer of the first subschema that has what the error names, and the keyword; empty if
    the error names nothing that is found."""
    for keyword, value in _read_names(error):
        for pointer, found in walk_schema(schema):
            if keyword in found and (value is None or _quotes(value, str(found[keyword]))):
                return f"{pointer}/{keyword}"
    return ""


def _quotes(value: str, text: str) -> bool:
    """Whether an error's value is that of a keyword; it may be a resolved URI."""
    return value in text or value.endswith(text.split("#")[0] or "#")


def _read_names(error: str) -> Iterator[tuple[str, str | None]]:
    """The keywords that an error speaks of, each with a part of its value if it quotes one."""
    if match := UNIMPLEMENTED.search(error):
        try:
            yield from ((str(keyword), None) for keyword in json.loads(match[1]))
        except ValueError:
            return
    for keyword, pattern in QUOTING:
        if match := pattern.search(error):
            yield keyword, match[1].strip()
    if match := NAMING.search(error):
        yield match[1], None
    yield from ((keyword, None) for keyword, words in SPEAKING_OF if words in error)


def walk_schema(schema: object) -> Iterator[tuple[str, dict[str, object]]]:
    """Each subschema once with its JSON pointer, in the order of the text, then those elsewhere
    that a `$ref` names: other values of `const`, `enum` and unknown keywords are no schemas.
    O(schema)."""
    seen: set[int] = set()
    waiting = [("#", schema)]
    while waiting:
        start, part = waiting.pop(0)
        if id(part) in seen:
            continue
        for pointer, found in _walk(part, start, MAX_DEPTH):
            if id(found) not in seen:
                seen.add(id(found))
                yield pointer, found
                reference = found.get("$ref")
                if isinstance(reference, str) and reference.startswith("#/"):
                    waiting.append((reference, _resolve(schema, reference)))


def _resolve(schema: object, reference: str) -> object:
    """What a JSON pointer names; None if there is nothing."""
    for name in unquote(reference).split("/")[1:]:
        key = name.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, dict):
            schema = schema.get(key)
        elif isinstance(schema, list) and key.isdecimal() and int(key) < len(schema):
            schema = schema[int(key)]
        else:
            return None
    return schema


def _walk(schema: object, pointer: str, depth: int) -> Iterator[tuple[str, dict[str, object]]]:
    if not isinstance(schema, dict) or depth == 0:
        return
    yield pointer, schema
    for keyword, value in schema.items():
        at = f"{pointer}/{keyword}"
        if keyword in NAMED and isinstance(value, dict):
            for name, inner in value.items():
                yield from _walk(inner, f"{at}/{_escape(name)}", depth - 1)
        elif keyword in LISTED and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from _walk(inner, f"{at}/{index}", depth - 1)
        elif keyword in ONE:
            yield from _walk(value, at, depth - 1)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
