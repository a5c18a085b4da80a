"""Reads calls as their text arrives: what formats with JSON and with XML arguments share. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from gateway.readers.content import CallFinder
from gateway.readers.patterns import Pattern
from gateway.types.answer_parts import ToolCallArguments, ToolCallMalformed, ToolCallStart
from gateway.types.tools import Tools

MakeId = Callable[[str, int], str]  # of a call, from the function's name and the call's index


class CallSyntax(Protocol):
    """How a call is written. Each pattern ends with a fixed text: a match does not grow with more
    text."""

    @property
    def head(self) -> Pattern:
        """Up to the arguments; group `name`."""

    @property
    def between(self) -> Pattern | None:
        """From a call to the next one, group `more`, or to the end of all; None: each call has its
        mark."""


S = TypeVar("S", bound=CallSyntax)


@dataclass(frozen=True)
class CallRules:
    """Where calls begin, and which are accepted."""

    begins: tuple[str, ...]  # marks
    bare: bool  # a call can be the beginning of the answer, without a mark
    tools: Tools
    parallel: bool
    make_id: MakeId


class CallReader(CallFinder, Generic[S]):
    """Streams the arguments as they arrive. A call of a function that is not offered, and one that
    the syntax does not allow, is content. A subclass reads the arguments: `_read_arguments` is the
    state behind the head of a call, and calls `_end_call` or `_withdraw`."""

    def __init__(self, rules: CallRules, syntaxes: Sequence[S]):
        super().__init__(rules.begins, rules.bare)
        self._rules, self._syntaxes, self._syntax = rules, syntaxes, syntaxes[0]
        self._index = -1

    def _read_arguments(self, final: bool) -> bool:
        raise NotImplementedError

    def _begin_arguments(self, name: str) -> None:
        """Prepares for the arguments of a call of this function."""
        raise NotImplementedError

    def _read_call(self, final: bool) -> bool:
        """The head of a call."""
        waits = False
        for syntax in self._syntaxes:
            found = syntax.head.match(self._text, partial=not final or self._cut)
            if found is not None and not found.partial:
                return self._start(syntax, found["name"], found.end())
            waits |= found is not None
        if final and waits and "".join(self._call).strip():  # a limit cut a call that has its mark
            self._text, self._call = "", []
        return self._reject_call() if final or not waits else False

    def _start(self, syntax: S, name: str, chars: int) -> bool:
        if name not in self._rules.tools:
            return self._reject_call()
        self._take(chars)
        self._index += 1
        call_id = self._rules.make_id(name, self._index)
        self._add(ToolCallStart(self._index, call_id, name))
        self._syntax, self._state = syntax, self._read_arguments
        self._begin_arguments(name)
        return True

    def _add_arguments(self, text: str) -> None:
        self._add(ToolCallArguments(self._index, text))

    def _end_call(self) -> None:
        super()._end_call()
        if not self._rules.parallel:
            self._state = self._skip_rest
        else:
            self._state = self._read_between if self._syntax.between else self._read_content

    def _read_between(self, final: bool) -> bool:
        assert self._syntax.between is not None
        found = self._syntax.between.match(self._text, partial=True)
        if found is not None and found.partial and not final:
            return False
        if found is not None:
            self._take(found.end())
        more = found is not None and found.group("more") is not None
        self._state = self._read_call if more else self._read_content
        if not more:
            self._call = []
        return True

    def _withdraw(self) -> bool:
        self._add(ToolCallMalformed(self._index, self._pop_call()))
        self._drops_blanks = False
        self._state = self._read_content
        return True
