"""Reads calls in Python and in XML, each at once when it is complete. Pure."""

import ast
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gateway.readers.content import CallFinder
from gateway.readers.json_calls import MakeId
from gateway.readers.patterns import Pattern
from gateway.readers.scanning import BracketScanner
from gateway.types.answer_parts import ToolCallArguments, ToolCallStart
from gateway.types.tools import Tool

Calls = Sequence[tuple[str, Mapping[str, object]]]  # names and arguments
Tools = Mapping[str, Tool]


class NotACall(Exception):
    """The text is not what the syntax says."""


@dataclass(frozen=True)
class WholeCallSyntax:
    """How calls that are read at once are written."""

    begins: tuple[str, ...]
    read: Callable[[str, Tools], Calls]  # of the text between marks; raises NotACall
    end: str = ""  # a mark; empty: where the brackets close
    bare: bool = False
    after: str = ""  # a mark that may follow


class WholeCallReader(CallFinder):
    """Each call is one piece. One that cannot be read, or that the request does not offer, is
    content."""

    def __init__(self, syntax: WholeCallSyntax, tools: Tools, parallel: bool, make_id: MakeId):
        super().__init__(syntax.begins, syntax.bare)
        self._syntax, self._tools = syntax, tools
        self._parallel, self._make_id = parallel, make_id
        self._index = -1
        self._scanner: BracketScanner | None = None
        self._scanned = 0

    def _read_call(self, final: bool) -> bool:
        end, after = self._find_end()
        if end < 0 and not final and after >= 0:
            return False
        try:
            if end < 0:
                raise NotACall
            calls = self._syntax.read(self._text[:end], self._tools)
            if not calls or any(name not in self._tools for name, _ in calls):
                raise NotACall
            written = [(name, _write_json(arguments)) for name, arguments in calls]
        except (NotACall, SyntaxError, ValueError, RecursionError, MemoryError):
            self._scanner = None
            return self._reject_call()
        self._take(after)
        self._scanner = None
        for name, text in written if self._parallel else written[:1]:
            self._index += 1
            call_id = self._make_id(name, self._index)
            self._parts.append(ToolCallStart(self._index, call_id, name))
            self._parts.append(ToolCallArguments(self._index, text))
        self._end_call()
        self._state = self._read_after if self._parallel else self._skip_rest
        return True

    def _find_end(self) -> tuple[int, int]:
        """The end of the call's text, and that of its mark. -1: not yet; both: never."""
        if self._syntax.end:
            end = self._text.find(self._syntax.end)
            return end, end + len(self._syntax.end) if end >= 0 else 0
        if self._scanner is None:
            if not self._text.lstrip()[:1]:
                return -1, 0
            if self._text.lstrip()[0] != "[":
                return -1, -1
            self._scanner, self._scanned = BracketScanner("\"'", None), 0
        if not (self._scanner.ended or self._scanner.failed):
            self._scanned += self._scanner.feed(self._text[self._scanned :])
        if self._scanner.failed:
            return -1, -1
        return (self._scanned, self._scanned) if self._scanner.ended else (-1, 0)

    def _read_after(self, final: bool) -> bool:
        """Skips the mark that may follow the calls."""
        text, mark = self._text.lstrip(), self._syntax.after
        if not final and len(text) < len(mark) and mark.startswith(text):
            return False
        if text.startswith(mark):
            self._text = text[len(mark) :]
        self._state = self._read_content
        return True


def _write_json(arguments: Mapping[str, object]) -> str:
    """Raises ValueError for an infinite number, which JSON cannot express."""
    return json.dumps(arguments, ensure_ascii=False, allow_nan=False)


def read_python_calls(text: str, tools: Tools) -> Calls:
    """The calls of a list such as `[f(a=1), g(b="x")]`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a model's unusual escapes
        body = ast.parse(text.strip(), mode="eval").body
    if not isinstance(body, ast.List):
        raise NotACall
    return [_read_python_call(each) for each in body.elts]


def _read_python_call(call: ast.expr) -> tuple[str, Mapping[str, object]]:
    if not isinstance(call, ast.Call) or call.args:
        raise NotACall
    return ast.unparse(call.func), {
        keyword.arg: _read_python_value(keyword.value) for keyword in call.keywords if keyword.arg
    }


def _read_python_value(value: ast.expr) -> object:
    match value:
        case ast.Name(id=name) if name in JSON_NAMES:
            return JSON_NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_read_python_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [ast.literal_eval(key) if key else None for key in keys]
            if not all(isinstance(name, str) for name in names):
                raise NotACall
            return dict(zip(names, map(_read_python_value, values), strict=True))
        case _:
            read = ast.literal_eval(value)
            if not isinstance(read, str | int | float | bool | None):
                raise NotACall
            return read


JSON_NAMES: Mapping[str, object] = {"true": True, "false": False, "null": None}


@dataclass(frozen=True)
class XmlCallSyntax:
    """A call as tags: the function's name, then a name and a value for each argument."""

    head: Pattern  # group `name`
    argument: Pattern  # groups `key` and `value`; ends with `close`
    close: str

    def read(self, text: str, tools: Tools) -> Calls:
        """The one call of a text. Values become what the schema of the function says."""
        head = self.head.match(text)
        if head is None:
            raise NotACall
        tool = tools.get(head["name"])
        schemas = tool.parameters.get("properties") if tool else None
        known = schemas if isinstance(schemas, Mapping) else {}
        end = text.rfind(self.close) + len(self.close)  # behind it, each search would fail late
        arguments = {
            found["key"]: _read_typed(found["value"], known.get(found["key"]))
            for found in self.argument.finditer(text, head.end(), end)
        }
        return [(head["name"], arguments)]


def _read_typed(text: str, schema: object) -> object:
    """A value of an argument: a string if the schema says so or it is not JSON."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "string":
        return text
    try:
        read: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return read
