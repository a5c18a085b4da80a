"""The fewest tokens of an answer that follows a constraint. Pure.

It is a lower bound: what is not understood counts as nothing. An answer that follows a constraint
contains certain literals one after the other, such as the names of required properties. Two of them
share at most one token, so that literals which need c₁, c₂, … tokens need 1 + Σ (cᵢ − 1) together.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from gateway.grammars.calls import may_be_json
from gateway.grammars.token_index import TokenIndex
from gateway.types.constraint import CallSource, CallsSource, Constraint, ConstraintKind, Pieces

MAX_SCHEMAS = 2_000  # of one constraint that are looked at
MAX_DEPTH = 40
MAX_LITERALS = 256
MAX_TOKENS = 2**31 - 1  # more says nothing
PLAIN = re.compile(r"[ !#-\[\]-~]*")  # written in JSON as it is


@dataclass(frozen=True, slots=True)
class Floor:
    """What each accepted text has at least: bytes, and tokens beyond the first one."""

    bytes: int = 0
    further_tokens: int = 0

    def __add__(self, other: "Floor") -> "Floor":
        """Of a text behind another."""
        return Floor(self.bytes + other.bytes, self.further_tokens + other.further_tokens)

    def __mul__(self, times: int) -> "Floor":
        return Floor(self.bytes * times, self.further_tokens * times)

    def __or__(self, other: "Floor") -> "Floor":
        """Of a text that follows one of two."""
        least = min(self.further_tokens, other.further_tokens)
        return Floor(min(self.bytes, other.bytes), least)

    def __and__(self, other: "Floor") -> "Floor":
        """Of a text that follows both."""
        most = max(self.further_tokens, other.further_tokens)
        return Floor(max(self.bytes, other.bytes), most)

    def tokens(self, longest: int) -> int:
        """`longest`: bytes of the longest token."""
        return max(self.further_tokens + bool(self.bytes), -(-self.bytes // longest))


NOTHING, VALUE, ENCLOSED = Floor(), Floor(1), Floor(2)  # of any text, JSON value, and JSON object


def count_least_tokens(constraint: Constraint, forced: bytes, index: TokenIndex) -> int:
    """The fewest tokens of an answer that is not empty, without the end. `forced` is what each
    answer begins with. At most MAX_SCHEMAS schemas and MAX_LITERALS literals are looked at."""
    literals = Literals(index)
    if constraint.kind is ConstraintKind.CHOICE and not constraint.after:
        choices = json.loads(constraint.source)
        return min(map(literals.spell, choices))
    floor = VALUE & _measure(constraint, literals) & literals.cover(forced)
    return min(floor.tokens(index.longest), MAX_TOKENS)


class Literals:
    """Measures texts by a vocabulary: the first MAX_LITERALS, and the others by their bytes."""

    def __init__(self, index: TokenIndex):
        self._index = index
        self._left = MAX_LITERALS

    def cover(self, text: bytes) -> Floor:
        """Of this text within another."""
        if not text or not self._take():
            return Floor(len(text))
        return Floor(len(text), self._index.cover(text) - 1)

    def spell(self, text: str) -> int:
        """The fewest tokens of the whole text."""
        return self._index.spell(text.encode()) if self._take() else int(text != "")

    def _take(self) -> bool:
        self._left -= 1
        return self._left >= 0


def _measure(constraint: Constraint, literals: Literals) -> Floor:
    measure = _MEASURES.get(constraint.kind)
    return measure(constraint.source, literals) if measure else NOTHING


def _measure_choices(source: str, literals: Literals) -> Floor:
    return _any_of(literals.cover(choice.encode()) for choice in json.loads(source))


def _measure_schema(source: str, literals: Literals) -> Floor:
    return SchemaMeasure(json.loads(source), literals).of_root()


def _measure_calls(source: str, literals: Literals) -> Floor:
    """Of one call, or of the answer that may take its place. None within free text or messages, and
    none of a call that may be JSON with other blanks."""
    calls: CallsSource = json.loads(source)
    if calls["free"] or calls["channels"] or may_be_json(calls):
        return NOTHING

    def write(pieces: Pieces) -> Floor:
        return _all_of(literals.cover(each.encode()) for each in pieces if isinstance(each, str))

    def measure_arguments(call: CallSource) -> Floor:
        """Of JSON; other syntaxes can be shorter."""
        if calls["arguments"]:
            return NOTHING
        return SchemaMeasure(call["schema"], literals).of_root()

    each = (write(call["begin"]) + measure_arguments(call) for call in calls["calls"])
    outer = [calls["mark"], calls["opening"], calls["end"], calls["closing"]]
    floor = _all_of(map(write, outer)) + _any_of(each)
    if answer := calls["answer"]:
        kind = ConstraintKind(answer["kind"])
        floor |= _measure(Constraint(kind, answer["source"]), literals)
    return floor


_MEASURES: Mapping[ConstraintKind, Callable[[str, Literals], Floor]] = {
    ConstraintKind.JSON_SCHEMA: _measure_schema,
    ConstraintKind.CHOICE: _measure_choices,
    ConstraintKind.TOOL_CALLS: _measure_calls,
}


def _all_of(floors: Iterable[Floor]) -> Floor:
    return sum(floors, NOTHING)


def _any_of(floors: Iterable[Floor]) -> Floor:
    """NOTHING for none."""
    found = list(floors)
    return reduce(Floor.__or__, found) if found else NOTHING


class SchemaMeasure:
    """The floors of one JSON schema and of those in it, each looked at once."""

    def __init__(self, root: object, literals: Literals):
        self._root = root
        self._literals = literals
        self._known: dict[int, Floor] = {}
        # With an $id in it, a reference may mean another place.
        self._refers = '"$id"' not in json.dumps(root)

    def of_root(self) -> Floor:
        return self._of(self._root, 0)

    def _of(self, schema: object, depth: int) -> Floor:
        """Of the values of a schema; VALUE within itself, and beyond the limits."""
        if not isinstance(schema, dict) or "x-guidance" in schema:
            return VALUE
        name = id(schema)
        if name not in self._known:
            if depth >= MAX_DEPTH or len(self._known) >= MAX_SCHEMAS:
                return VALUE
            self._known[name] = VALUE
            self._known[name] = reduce(Floor.__and__, self._parts(schema, depth + 1), VALUE)
        return self._known[name]

    def _parts(self, schema: Mapping[str, object], depth: int) -> Iterable[Floor]:
        """What each keyword alone demands."""
        yield self._typed(schema, depth)
        if "const" in schema:
            yield self._constant(schema["const"])
        if enum := _read_list(schema, "enum"):
            yield VALUE if len(enum) > MAX_LITERALS else _any_of(map(self._constant, enum))
        for keyword in ("anyOf", "oneOf"):
            if given := _read_list(schema, keyword):
                yield _any_of(self._of(each, depth) for each in given)
        for each in _read_list(schema, "allOf"):
            yield self._of(each, depth)
        if self._refers and isinstance(ref := schema.get("$ref"), str):
            yield self._of(_find(self._root, ref), depth)

    def _typed(self, schema: Mapping[str, object], depth: int) -> Floor:
        match schema.get("type"):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, depth)
            case "string" if "format" not in schema and "pattern" not in schema:
                return Floor(2 + _read_count(schema, "minLength"))
            case "null":
                return self._constant(None)
            case _:
                return VALUE

    def _object(self, schema: Mapping[str, object], depth: int) -> Floor:
        properties = schema.get("properties")
        known = properties if isinstance(properties, dict) else {}
        required = {name for name in _read_list(schema, "required") if isinstance(name, str)}
        pairs = (self._constant(name) + self._of(known.get(name), depth) for name in required)
        pair = ENCLOSED + VALUE
        return (ENCLOSED + _all_of(pairs)) & (pair * _read_count(schema, "minProperties"))

    def _array(self, schema: Mapping[str, object], depth: int) -> Floor:
        items = schema.get("items")
        first = _read_list(schema, "prefixItems") or _read_list(schema, "items")
        count = _read_count(schema, "minItems")
        further = max(0, count - len(first))
        floor = ENCLOSED + _all_of(self._of(each, depth) for each in first[:count])
        return floor + self._of(items, depth) * further if further else floor

    def _constant(self, value: object) -> Floor:
        """Of one value's text. Numbers have several."""
        if isinstance(value, str):
            if not PLAIN.fullmatch(value):
                return Floor(2 + len(value))
            return self._literals.cover(f'"{value}"'.encode())
        if value is None or isinstance(value, bool):
            return self._literals.cover(json.dumps(value).encode())
        return ENCLOSED if isinstance(value, dict | list) else VALUE


def _read_list(schema: Mapping[str, object], keyword: str) -> list[object]:
    value = schema.get(keyword)
    return value if isinstance(value, list) else []


def _read_count(schema: Mapping[str, object], keyword: str) -> int:
    value = schema.get(keyword)
    return max(0, value) if isinstance(value, int) else 0


def _find(root: object, pointer: str) -> object:
    """The schema at a JSON pointer such as #/$defs/x; None if there is none."""
    if "%" in pointer or (pointer != "#" and not pointer.startswith("#/")):
        return None
    found = root
    for step in pointer.split("/")[1:]:
        if not isinstance(found, dict):
            return None
        found = found.get(step.replace("~1", "/").replace("~0", "~"))
    return found
