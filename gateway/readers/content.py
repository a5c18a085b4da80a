"""The text around the calls of an answer. Pure."""

from collections.abc import Collection, Sequence

from gateway.readers.scanning import count_held, find_mark
from gateway.readers.states import StateReader
from gateway.types.answer_parts import AnswerPart, Content


class ContentReader:
    """All text is content."""

    def feed(self, text: str) -> Sequence[AnswerPart]:
        return [Content(text)] if text else []

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        return []


class CallFinder(StateReader):
    """Content, up to the marks at which calls begin.

    Blanks before a mark and after a call are dropped. A subclass reads the calls: `_read_call` is
    the state behind a mark, and sets `_state` to `_read_content` at the end of the call.
    """

    def __init__(self, begins: Collection[str], bare: bool):
        """`bare`: a call can be the beginning of the answer, without a mark."""
        super().__init__(self._read_start if bare else self._read_content)
        self._begins = begins
        self._call: list[str] = []  # what was read of the current call, with the blanks before it
        self._drops_blanks = False

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
            self._call, self._text = [text[len(before) : at + len(mark)]], text[at + len(mark) :]
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
        taken = super()._take(chars)
        self._call.append(taken)
        return taken

    def _pop_call(self) -> str:
        """What was read of the current call, which ends."""
        text, self._call = "".join(self._call), []
        return text

    def _end_call(self) -> None:
        self._call = []
        self._drops_blanks = True

    def _reject_call(self) -> bool:
        """What was read of a call is content, and so is what follows, up to the next mark."""
        self._add_content(self._pop_call())
        self._state = self._read_content
        return True

    def _add_content(self, text: str) -> None:
        if text:
            self._add(Content(text))
            self._drops_blanks = False
