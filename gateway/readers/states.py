"""Reads the text of an answer in states, as it arrives. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from gateway.types.answer_parts import AnswerPart, Content, Reasoning, ToolCallStart

State = Callable[[bool], bool]  # reads on; whether it advanced. Its argument: the text has ended
# Longer text is read in pieces. To take the beginning of a text copies the rest of it, so that the
# time would grow with the square of the text.
PIECE_CHARS = 4_096


def over(final: bool) -> bool:
    """The state at the end. It does not refer to its reader, which is then freed at once."""
    return False


class StateReader:
    """An `AnswerReader`. A subclass defines the states: methods that take from `_text`, add parts,
    and set the next state. What they say does not depend on how the text is divided."""

    def __init__(self, state: State):
        self._state = state
        self._text = ""  # not read yet
        self._fed_chars = 0
        self._parts: list[AnswerPart] = []
        self._cut = False  # a limit has ended the text

    def feed(self, text: str) -> Sequence[AnswerPart]:
        for at in range(0, len(text), PIECE_CHARS):
            piece = text[at : at + PIECE_CHARS]
            self._text += piece
            self._fed_chars += len(piece)
            self._run(final=False)
        return self._pop_parts()

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        self._cut = cut
        self._run(final=True)
        self._state = over
        return self._pop_parts()

    @property
    def _read_chars(self) -> int:
        return self._fed_chars - len(self._text)

    def _run(self, final: bool) -> None:
        while self._state(final):
            pass

    def _pop_parts(self) -> Sequence[AnswerPart]:
        parts, self._parts = self._parts, []
        return merge_parts(parts)

    def _take(self, chars: int) -> str:
        """Reads so many characters."""
        taken, self._text = self._text[:chars], self._text[chars:]
        return taken

    def _add(self, part: AnswerPart) -> None:
        """Adds a part, unless it is an empty piece of text."""
        if isinstance(part, ToolCallStart) or part.text:
            self._parts.append(part)


def merge_parts(parts: Sequence[AnswerPart]) -> Sequence[AnswerPart]:
    """The same parts, with adjacent pieces of one text in one part. O(text)."""
    if len(parts) < 2:
        return parts
    return [_join(group) for _, group in groupby(parts, _name_text)]


def _name_text(part: AnswerPart) -> tuple[type[AnswerPart], int]:
    """Equal for pieces of one text."""
    return type(part), 0 if isinstance(part, Content | Reasoning) else part.index


def _join(parts: Iterable[AnswerPart]) -> AnswerPart:
    first, *others = parts
    if not others or isinstance(first, ToolCallStart):
        return first
    texts = (part.text for part in others if not isinstance(part, ToolCallStart))
    return replace(first, text="".join((first.text, *texts)))
