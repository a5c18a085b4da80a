"""Reads calls written in Python, a list of them at once when it is complete. Pure."""

import ast
import json
import warnings
from collections.abc import Mapping, Sequence

from gateway.readers.calls.reader import CallRules
from gateway.readers.content import CallFinder
from gateway.readers.patterns import compile_pattern
from gateway.readers.scanning import BracketScanner
from gateway.types.answer_parts import ToolCallArguments, ToolCallStart

Calls = Sequence[tuple[str, Mapping[str, object]]]  # names and arguments
HEAD = compile_pattern(r" \[ (?P<name>[a-zA-Z_][a-zA-Z0-9_.]{0,255}) \(")


class NotACall(Exception):
    """The text is no list of calls."""


class PythonCallReader(CallFinder):
    """A list such as `[f(a=1), g(b="x")]` is one piece. One that cannot be read, or that calls what
    the request does not offer, is content."""

    def __init__(self, rules: CallRules, after: str):
        """`after`: a mark that may follow."""
        super().__init__(rules.begins, rules.bare)
        self._rules, self._after = rules, after
        self._index = -1
        self._scanner, self._scanned = BracketScanner("\"'", None), 0
        self._has_head = False

    def _read_call(self, final: bool) -> bool:
        if not self._has_head:
            found = HEAD.match(self._text, partial=not final)
            if found is None:
                return self._reject_call()
            if found.partial:
                return False
            self._scanner, self._scanned = BracketScanner("\"'", None), 0
            self._has_head = True
        scanner = self._scanner
        start = len(self._text) - len(self._text.lstrip()) if not self._scanned else self._scanned
        self._scanned = start + scanner.feed(self._text[start:])
        if not (scanner.ended or scanner.failed or final):
            return False
        self._has_head = False
        try:
            if not scanner.ended:
                raise NotACall
            calls = read_python_calls(self._text[: self._scanned])
            if any(name not in self._rules.tools for name, _ in calls):
                raise NotACall
            written = [(name, _write_json(arguments)) for name, arguments in calls]
        except (NotACall, SyntaxError, ValueError, RecursionError, MemoryError):
            return self._reject_call()
        self._take(self._scanned)
        for name, text in written if self._rules.parallel else written[:1]:
            self._index += 1
            call_id = self._rules.make_id(name, self._index)
            self._add(ToolCallStart(self._index, call_id, name))
            self._add(ToolCallArguments(self._index, text))
        self._end_call()
        self._state = self._read_after if self._rules.parallel else self._skip_rest
        return True

    def _read_after(self, final: bool) -> bool:
        """Skips the mark that may follow the calls."""
        text, mark = self._text.lstrip(), self._after
        if not final and len(text) < len(mark) and mark.startswith(text):
            return False
        if text.startswith(mark):
            self._text = text[len(mark) :]
        self._state = self._read_content
        return True


def _write_json(arguments: Mapping[str, object]) -> str:
    """Raises ValueError for an infinite number, which JSON cannot express."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # halves of characters, which only an escape can express
        text = json.dumps(arguments, allow_nan=False)
    return text


def read_python_calls(text: str) -> Calls:
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
    arguments = {each.arg: _read_python_value(each.value) for each in call.keywords if each.arg}
    if len(arguments) < len(call.keywords):
        raise NotACall
    return ast.unparse(call.func), arguments


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
