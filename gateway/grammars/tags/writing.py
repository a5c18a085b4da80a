"""The parts of an answer with structural tags as a grammar in Lark. Pure.

Text ends at the first occurrence of a mark that may follow it: it is one lazy lexeme with it.
"""

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from gateway.grammars.lark import Grammars, write_mark
from gateway.grammars.tags.parts import (
    Choice,
    Dispatch,
    Grammar,
    Mark,
    Marks,
    Part,
    Regex,
    Repeat,
    Row,
    Schema,
    Text,
    is_open,
)

NOTHING = '""'


class TagWriter:
    """Writes one grammar: `lark` of the rules, which refer to the grammars `inner`."""

    def __init__(
        self,
        embed: Callable[[Schema], Mapping[str, object]],
        serialize: Callable[[Regex | Grammar], Grammars],
    ):
        self._embed, self._serialize = embed, serialize
        self._rules: list[str] = []
        self._terminals: dict[str, str] = {}  # names by definition
        self.inner: Grammars = []

    def write(self, part: Part) -> str:
        """The grammar of an answer that is this part."""
        start = self._write(part, ())
        terminals = [f"{name}: {definition}" for definition, name in self._terminals.items()]
        return "\n".join([f"start: {start}", *self._rules, *terminals])

    def _write(self, part: Part, ends: Sequence[Mark]) -> str:
        """What matches a part, and one of the marks behind it if there are any."""
        match part:
            case Text():
                return self._write_text(part, ends)
            case Dispatch():
                return self._write_dispatch(part, ends)
            case Choice(parts):
                return f"({' | '.join(self._write(each, ends) for each in parts)})"
            case Row(parts):
                return self._write_row(parts, ends)
        return f"{self._write_closed(part)} {_write_marks(ends)}"

    def _write_closed(self, part: Marks | Schema | Regex | Grammar | Repeat) -> str:
        match part:
            case Marks(choices):
                return _write_marks(choices)
            case Schema():
                return f"%json {json.dumps(self._embed(part), ensure_ascii=False)}"
            case Regex() | Grammar():
                return self._refer(self._serialize(part))
            case Repeat(inner, least, most):
                limit = "" if most is None else most
                return f"({self._write(inner, ())}){{{least},{limit}}}"

    def _write_row(self, parts: Sequence[Part], ends: Sequence[Mark]) -> str:
        written: list[str] = []
        waiting = deque([*parts, *([Marks(ends)] if ends else [])])
        while waiting:
            part, marks = waiting.popleft(), Marks(())
            if waiting and is_open(part):
                following = waiting.popleft()
                assert isinstance(following, Marks), "only marks follow an open part"
                marks = following
            written.append(self._write(part, marks.choices))
        return " ".join(written) or NOTHING

    def _write_text(self, text: Text, ends: Sequence[Mark]) -> str:
        terminal = self._define(text)
        words = [mark for mark in ends if isinstance(mark, str)]
        ids = [mark for mark in ends if isinstance(mark, int)]
        choices = [f"{terminal} {_write_marks(ids)}"] if ids or not ends else []
        if words:
            choices.append(self._name(f"{terminal} {_write_marks(words)}", "[lazy]"))
        return f"({' | '.join(choices)})"

    def _write_dispatch(self, dispatch: Dispatch, ends: Sequence[Mark]) -> str:
        text, parts = dispatch.text, dispatch.parts.items()
        written = [(mark, self._name(self._write(part, ()))) for mark, part in parts]
        each = " | ".join(f"{self._write_text(text, [mark])} {part}" for mark, part in written)
        first = " | ".join(f"{_write_marks([mark])} {part}" for mark, part in written)
        if dispatch.repeated:
            rest = f"({each})* {self._write_text(text, ends)}"
            return f"({first}) {rest}" if dispatch.needed else rest
        if dispatch.needed:
            return f"({first}) {_write_marks(ends)}"
        return f"(({each}) {_write_marks(ends)} | {self._write_text(text, ends)})"

    def _name(self, written: str, options: str = "") -> str:
        """A new rule of this text."""
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{options}: {written}")
        return name

    def _define(self, text: Text) -> str:
        """The terminal of a text."""
        most = "*" if text.max_chars is None else f"{{0,{text.max_chars}}}"
        definition = f"/(?s:.){most}/"
        if text.excludes:
            words = "|".join(map(_escape, text.excludes))
            definition += f" & ~/(?s:.*)({words})(?s:.*)/"
        return self._terminals.setdefault(definition, f"TEXT_{len(self._terminals)}")

    def _refer(self, grammars: Grammars) -> str:
        """A reference to a grammar, the first of these; the others are its own."""
        first, *others = grammars
        name = f"inner_{len(self.inner)}"
        self.inner += [{**first, "name": name}, *others]
        return f"@{name}"


def _write_marks(marks: Sequence[Mark]) -> str:
    written = [*map(write_mark, marks)]
    return written[0] if len(written) == 1 else f"({' | '.join(written)})" if written else ""


def _escape(text: str) -> str:
    """A text as a regex within `/…/`."""
    return "".join(char if char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)
