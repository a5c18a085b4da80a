"""Separates reasoning from the rest of an answer. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gateway.readers.content import ContentReader
from gateway.readers.scanning import count_held, find_mark
from gateway.readers.states import StateReader, merge_parts
from gateway.types.answer_parts import AnswerPart, AnswerReader, Reasoning


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks around reasoning, which is at the beginning of an answer."""

    start: str
    end: str
    implied: bool = False  # an answer begins with reasoning, also without `start`

    def is_opened_by(self, prompt_end: str) -> bool | None:
        """Whether the answer to a prompt with this end begins within the reasoning; None:
        only if it begins with `start`."""
        prompt_end = prompt_end.rstrip()
        if prompt_end.endswith(self.end):
            return False
        return True if self.implied or prompt_end.endswith(self.start) else None


THINK = ReasoningFormat("<think>", "</think>")
IMPLIED_THINK = ReasoningFormat("<think>", "</think>", implied=True)
# By vLLM's names of its parsers.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    "qwen3": THINK,
    "deepseek_r1": IMPLIED_THINK,
    "deepseek_v3": THINK,
    "deepseek_v3_2": THINK,
    "glm45": THINK,
    "holo2": THINK,
    "hunyuan_a13b": THINK,
    "hy_v3": THINK,
    "ernie45": THINK,
    "minimax_m2": IMPLIED_THINK,
    "nemotron_v3": THINK,
    "step3": IMPLIED_THINK,
    "step3p5": THINK,
    "kimi_k2": THINK,
    "olmo3": THINK,
    "mimo": THINK,
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "granite": ReasoningFormat("Here is my thought process:", "Here is my response:"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
}
# Texts in chat templates and the format that they show; the first that is found counts.
REASONING_MARKS: tuple[tuple[str, str], ...] = (
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("Here is my thought process:", "granite"),
    ("<think>", "qwen3"),
    ("</think>", "deepseek_r1"),
)


class ReasoningReader(StateReader):
    """Reads the reasoning, then leaves the text to another reader. Blanks around the reasoning are
    dropped."""

    def __init__(
        self, form: ReasoningFormat, opened: bool | None, rest: AnswerReader | None = None
    ):
        """`opened`: whether the answer begins within the reasoning; None: if it has the mark."""
        super().__init__(self._leave if opened is False else self._read_start)
        self._format, self._opened = form, opened
        self._rest: AnswerReader = rest or ContentReader()
        self.reasoning_chars = 0  # of the answer, up to the end of the reasoning and of its mark
        self.passes = False  # whether further text goes to the other reader as it is

    @property
    def passes_content(self) -> bool:
        """Whether further text is content as it is."""
        return self.passes and isinstance(self._rest, ContentReader)

    def feed(self, text: str) -> Sequence[AnswerPart]:
        return self._rest.feed(text) if self.passes else super().feed(text)

    def finish(self, cut: bool = False) -> Sequence[AnswerPart]:
        return merge_parts([*super().finish(cut), *self._rest.finish(cut)])

    def _read_start(self, final: bool) -> bool:
        """The mark before the reasoning; a prompt that has it may be repeated."""
        body, start = self._text.lstrip(), self._format.start
        if body.startswith(start):
            self._take(len(self._text) - len(body) + len(start))
            self._state = self._skip_blanks
        elif not final and start.startswith(body):
            return False
        else:
            self._state = self._skip_blanks if self._opened else self._leave
        return True

    def _skip_blanks(self, final: bool) -> bool:
        """Blanks before the reasoning."""
        body = self._text.lstrip()
        self._take(len(self._text) - len(body))
        self._state = self._read_reasoning
        if body or final:
            return True
        self._state = self._skip_blanks
        return False

    def _read_reasoning(self, final: bool) -> bool:
        text, marks = self._text, (self._format.end,)
        at, mark = find_mark(text, marks)
        if mark:
            self._add(Reasoning(self._take(at).rstrip()))
            self._take(len(mark))
            self.reasoning_chars = self._read_chars
            self._state = self._skip_blanks_after
            return True
        self._add(Reasoning(self._take(len(text) - (0 if final else count_held(text, marks)))))
        self.reasoning_chars = self._fed_chars
        return False

    def _skip_blanks_after(self, final: bool) -> bool:
        body = self._text.lstrip()
        self._take(len(self._text) - len(body))
        if not body:
            return False
        self._state = self._leave
        return True

    def _leave(self, final: bool) -> bool:
        """The rest is the other reader's."""
        self.passes = True
        self._parts += self._rest.feed(self._take(len(self._text)))
        return False
