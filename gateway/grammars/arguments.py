"""Lark grammars of arguments that are written one by one: as XML elements, or in Python. Pure."""

import json
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from typing import cast

from gateway.grammars.lark import TEXT, quote, write_pieces, write_regex
from gateway.readers.calls.parameters import (
    DEFINITIONS,
    allows_any,
    is_text,
    list_parameters,
    resolve,
)
from gateway.types.constraint import ArgumentsSource, Pieces

Schema = Mapping[str, object]
Embed = Callable[[object], Schema]  # a schema, as Lark grammars embed it

PYTHON_NAMES = {"boolean": '("True" | "False")', "null": '"None"'}
ANY_KEY = f"/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ & ~/{'|'.join(keyword.kwlist)}/"
DAY, CLOCK = r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|1\d|2[0-8])", r"([01]\d|2[0-3]):[0-5]\d:[0-5]\d"
ZONE = r"(\.\d{1,6})?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)"
FORMATS = {
    "date": DAY,
    "time": CLOCK + ZONE,
    "date-time": f"{DAY}T{CLOCK}{ZONE}",
    "uuid": "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
    "email": r"[a-zA-Z0-9_+-]{1,32}(\.[a-zA-Z0-9_+-]{1,32}){0,3}@([a-z0-9]{1,32}\.){1,3}[a-z]{2,8}",
    "ipv4": r"((25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)\.){3}(25[0-5]|2[0-4]\d|1\d\d|[1-9]?\d)",
}


class ArgumentFault(Exception):
    """The schema of an argument cannot be enforced; the message says why."""


def write_arguments(
    rule: str, schema: Schema, source: ArgumentsSource | None, embed: Embed
) -> Iterator[str]:
    """Rules of the arguments of one call, of which `rule` is the outermost. Raises
    ArgumentFault."""
    if source is None:
        yield f"{rule}: %json {json.dumps(embed(schema))}"
        return
    if allows_any(schema):
        yield from _write_any(rule, source, embed)
        return
    listed = list(list_parameters(schema))
    for at, (key, parameter, _) in enumerate(listed):
        yield from _write_argument(f"{rule}_{at}", key, parameter, schema, source, embed)
    separator, count = write_pieces(source["separator"]), len(listed)
    yield f'{rule}_from_{count}: ""'
    for at in reversed(range(count)):  # what may follow other arguments
        optional = "" if listed[at][2] else "?"
        yield f"{rule}_from_{at}: ({separator} {rule}_{at}){optional} {rule}_from_{at + 1}"
    first_needed = next((at for at in range(count) if listed[at][2]), count)
    firsts = [f"{rule}_{at} {rule}_from_{at + 1}" for at in range(min(first_needed + 1, count))]
    if first_needed == count:
        firsts.append('""')
    yield f"{rule}: {' | '.join(firsts)}"


def _write_any(rule: str, source: ArgumentsSource, embed: Embed) -> Iterator[str]:
    """Any arguments; in Python at most one, as keys must differ."""
    before = [_fill(piece, "KEY", "false") for piece in source["before"]]
    yield f"{rule.upper()}_KEY: {ANY_KEY}"
    parts: list[str] = []
    for piece in before:
        if isinstance(piece, str) and "KEY" in piece:
            start, _, end = piece.partition("KEY")
            parts += [write_pieces([start]), f"{rule.upper()}_KEY", write_pieces([end])]
        else:
            parts.append(write_pieces([piece]))
    value = f"%json {json.dumps(embed({}))} {write_pieces(source['after'])}"
    yield f"{rule}: ({' '.join(parts)} {value}){'*' if source['not_text'] else '?'}"


def _write_argument(
    rule: str, key: str, schema: object, root: Schema, source: ArgumentsSource, embed: Embed
) -> Iterator[str]:
    after = source["after"]
    text = bool(source["not_text"]) and is_text(schema, root)
    before = write_pieces([_fill(p, key, str(text).lower()) for p in source["before"]])
    if text:
        found = cast(Schema, resolve(schema, root))
        terminal = rule.upper()
        ending, rest = _split(after)
        yield f"{terminal}: {_write_text(key, found, source['not_text'])} {quote(ending)}"
        yield f"{rule}: {before} {terminal} {write_pieces(rest)}"
        return
    meant = resolve(schema, root)
    kind = meant.get("type") if isinstance(meant, Mapping) and not source["not_text"] else None
    if isinstance(kind, str) and kind in PYTHON_NAMES:
        value = PYTHON_NAMES[kind]
    else:
        value = f"%json {json.dumps(embed(_with_definitions(schema, root)))}"
    yield f"{rule}: {before} {value} {write_pieces(after)}"


def _with_definitions(schema: object, root: Schema) -> object:
    if not isinstance(schema, Mapping):
        return schema
    return {**schema, **{each: root[each] for each in DEFINITIONS if each in root}}


def _write_text(key: str, schema: Schema, not_text: str) -> str:
    """The terminal of a text that follows a schema and is not `not_text`."""
    parts: list[str] = []
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        parts.append(f"({' | '.join(quote(each) for each in values if isinstance(each, str))})")
    if isinstance(pattern := schema.get("pattern"), str):
        parts.append(write_regex(_search(key, pattern)))
    if "minLength" in schema or "maxLength" in schema:
        parts.append(f"/(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})/")
    if isinstance(name := schema.get("format"), str):
        if name not in FORMATS:
            raise ArgumentFault(f"format {name[:80]!r} of {key[:80]} cannot be enforced in a text")
        parts.append(write_regex(FORMATS[name]))
    parts.append(f"~{write_regex(not_text)}")
    return f"({' & '.join([TEXT, *parts])})"


def _search(key: str, pattern: str) -> str:
    """An expression of all texts in which the pattern is found. Raises ArgumentFault for anchors
    that are not at its ends."""
    inner = pattern.removeprefix("^")
    ends = bool(re.search(r"(?<!\\)(\\\\)*\$$", inner))
    inner = inner[:-1] if ends else inner
    bare = re.sub(r"\\.|\[\^?\]?(\\.|[^\]\\])*\]", "", inner, flags=re.S)
    if "^" in bare or "$" in bare or "(?" in bare.replace("(?:", ""):
        raise ArgumentFault(f"pattern of {key[:80]} cannot be enforced in a text: {pattern[:80]}")
    while (reduced := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = reduced
    if "|" in bare and (pattern.startswith("^") or ends):
        raise ArgumentFault(f"pattern of {key[:80]} needs parentheses around a|b: {pattern[:80]}")
    start, end = "" if pattern.startswith("^") else "(?s:.*)", "" if ends else "(?s:.*)"
    return f"{start}(?:{inner}){end}"


def _split(pieces: Pieces) -> tuple[str, Pieces]:
    """The text with which pieces begin, and what follows."""
    count = next((at for at, p in enumerate(pieces) if isinstance(p, int)), len(pieces))
    return "".join(map(str, pieces[:count])), pieces[count:]


def _fill(piece: str | int, key: str, is_text: str) -> str | int:
    if isinstance(piece, int):
        return piece
    return piece.replace("IS_TEXT", is_text).replace("KEY", key)
