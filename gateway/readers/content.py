"""The text around the calls of an answer. Pure."""

from collections.abc import Callable, Collection, Sequence

from gateway.readers.scanning import count_held, find_mark
from gateway.types.answer_parts import AnswerPart, Content, Reasoning, ToolCallArguments

State = Callable[[bool], bool]  # reads on; whether it advanced. Its argument: the text has ended


def over(final: bool) -> bool:
    """The state at the end. It does not refer to its reader, which is then freed at once."""
    return False


def add_part(parts: list[AnswerPart], part: AnswerPart) -> None:
    """Appends a part, or its text to the last one if that is of the same kind."""
    last = parts[-1] if parts else None
    match last, part:
        case Content(before), Content(text):
            parts[-1] = Content(before + text)
        case Reasoning(before), Reasoning(text):
            parts[-1] = Reasoning(before + text)
        case ToolCallArguments(same, before), ToolCallArguments(index, text) if same == index:
            parts[-1] = ToolCallArguments(index, before + text)
        case _:
            parts.append(part)


class ContentReader:
    """All text is content."""

    def feed(self, text: str) -> Sequence[AnswerPart]:
        return [Content(text)] if text else []

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        return []


class CallFinder:
    """Content, up to the marks at which calls begin.

    Blanks before a mark and after a call are dropped. A subclass reads the calls: `_read_call` is
    the state behind a mark, and sets `_state` to `_read_content` at the end of the call.
    """

    def __init__(self, begins: Collection[str], bare: bool):
        """`bare`: a call can be the beginning of the answer, without a mark."""
        self._begins = begins
        self._text = ""  # not read yet
        self._call_text = ""  # what was read of the current call, with the blanks before it
        self._parts: list[AnswerPart] = []
        self._state: State = self._read_start if bare else self._read_content
        self._drops_blanks = False
        self._cut = False

    def feed(self, text: str) -> Sequence[AnswerPart]:
        self._text += text
        return self._run(final=False)

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        self._cut = cut
        parts = self._run(final=True)
        self._state = over
        return parts

    def _run(self, final: bool) -> Sequence[AnswerPart]:
        while self._state(final):
            pass
        parts, self._parts = self._parts, []
        return parts

    def _read_call(self, final: bool) -> bool:
        raise NotImplementedError

    def _read_start(self, final: bool) -> bool:
        """Skips blanks before a bare call."""
        body = self._text.lstrip()
        if not body and not final:
            return False
        self._take(len(self._text) - len(body))
        self._state = self._read_call
        return True

    def _read_content(self, final: bool) -> bool:
        text = self._text.lstrip() if self._drops_blanks else self._text
        at, mark = find_mark(text, self._begins)
        if mark:
            before = text[:at].rstrip()
            self._add_content(before)
            self._call_text, self._text = text[len(before) : at + len(mark)], text[at + len(mark) :]
            self._state = self._read_call
            return True
        keep = 0 if final else count_held(text, self._begins)
        self._add_content(text[: len(text) - keep])
        self._text = text[len(text) - keep :]
        return False

    def _skip_rest(self, final: bool) -> bool:
        """The state behind the one call that an answer may have."""
        self._text = ""
        return False

    def _take(self, chars: int) -> str:
        """Reads so many characters of the current call."""
        taken, self._text = self._text[:chars], self._text[chars:]
        self._call_text += taken
        return taken

    def _end_call(self) -> None:
        self._call_text = ""
        self._drops_blanks = True

    def _reject_call(self) -> bool:
        """What was read of a call is content, and so is what follows, up to the next mark."""
        self._add_content(self._call_text)
        self._call_text = ""
        self._state = self._read_content
        return True

    def _add_content(self, text: str) -> None:
        if text:
            add_part(self._parts, Content(text))
            self._drops_blanks = False
