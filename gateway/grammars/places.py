"""Finds the place in a JSON schema that an error of llguidance speaks of. Pure.

llguidance names the keyword or the value, not where it is.
"""

import json
import re
from collections.abc import Iterator

# Keywords with schemas: one, a list of them, or a name for each.
ONE = frozenset(
    ("additionalProperties", "items", "additionalItems", "contains", "not", "if", "then", "else",
     "propertyNames", "unevaluatedItems", "unevaluatedProperties")
)  # fmt: skip
LISTED = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
MAX_DEPTH = 100  # of the walk

UNIMPLEMENTED = re.compile(r"Unimplemented keys: (\[.*?\])")
QUOTING = (  # an error that quotes the value of a keyword
    ("format", re.compile(r"Unknown format: (.*)")),
    ("type", re.compile(r"Invalid type: (.*)")),
    ("$ref", re.compile(r"Pointer '(.*)' does not exist")),
    ("$ref", re.compile(r"Resource '(.*?)' is not present")),
)
SPEAKING_OF = (  # an error that speaks of one keyword
    ("oneOf", "oneOf constraints are not supported"),
    ("pattern", "regex parse error"),
)


def find_place(schema: object, error: str) -> str:
    """JSON pointer of the first subschema that has what the error names, and the keyword; empty if
    the error names nothing that is found."""
    for keyword, value in _read_names(error):
        for pointer, found in walk_schema(schema):
            if keyword in found and (value is None or value in str(found[keyword])):
                return f"{pointer}/{keyword}"
    return ""


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
    yield from ((keyword, None) for keyword, words in SPEAKING_OF if words in error)


def walk_schema(
    schema: object, pointer: str = "#", depth: int = MAX_DEPTH
) -> Iterator[tuple[str, dict[str, object]]]:
    """Each subschema with its JSON pointer, in the order of the text; values of `const`, `enum` and
    unknown keywords are no schemas."""
    if not isinstance(schema, dict) or depth == 0:
        return
    yield pointer, schema
    for keyword, value in schema.items():
        at = f"{pointer}/{keyword}"
        if keyword in NAMED and isinstance(value, dict):
            for name, inner in value.items():
                yield from walk_schema(inner, f"{at}/{_escape(name)}", depth - 1)
        elif keyword in LISTED and isinstance(value, list):
            for index, inner in enumerate(value):
                yield from walk_schema(inner, f"{at}/{index}", depth - 1)
        elif keyword in ONE:
            yield from walk_schema(value, at, depth - 1)


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
