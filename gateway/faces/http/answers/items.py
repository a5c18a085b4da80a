"""The parts of one answer as items: runs of content or of reasoning, and tool calls. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.faces.http.answers.scores import TokenScores
from gateway.readers.content import ContentReader
from gateway.readers.harmony import HarmonyReader
from gateway.readers.reasoning import ReasoningReader
from gateway.requests.text import Text
from gateway.sessions.call import LiveChoice
from gateway.sessions.session import ChoiceChunk, Logprob
from gateway.types.answer_parts import (
    AnswerPart,
    AnswerReader,
    Content,
    Reasoning,
    ToolCallArguments,
    ToolCallMalformed,
    ToolCallStart,
)
from services.core import FinishReason


class ItemKind(Enum):
    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


@dataclass(slots=True, eq=False)
class Item:
    """One item. The text of a call is its arguments, as JSON."""

    index: int  # of the answer's items, from 0
    kind: ItemKind
    call_id: str = ""
    name: str = ""
    malformed: bool = False  # a call of a stream that turned out to be content
    complete: bool = False
    pieces: list[str] = field(default_factory=list)
    scores: list[Logprob] = field(default_factory=list)  # of the tokens of content, if wanted

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Started:
    item: Item


@dataclass(frozen=True, slots=True)
class Grown:
    item: Item
    text: str
    scores: Sequence[Logprob] = ()

    @property
    def is_content(self) -> bool:
        return self.item.kind is ItemKind.CONTENT


@dataclass(frozen=True, slots=True)
class Ended:
    item: Item


Step = Started | Grown | Ended


class AnswerItems:
    """Divides the text of one answer into items, in their order; one is open at a time."""

    def __init__(self, reader: AnswerReader | None, scores: TokenScores | None = None):
        """`reader`: None if the text is content as it is. `scores`: if items have those of their
        tokens."""
        self._reader = reader or ContentReader()
        self._scores = scores
        self._open: Item | None = None
        self.items: list[Item] = []

    @classmethod
    def of(cls, live: LiveChoice, scored: Text | None = None) -> "AnswerItems":
        """The items of a choice. `scored`: the model's, if items have the scores of tokens."""
        opened = live.request.open_reader
        detokenizer = scored and scored.detokenizer(live.request.sampling)
        scores = TokenScores(detokenizer) if detokenizer else None
        return cls(opened() if opened else None, scores)

    @property
    def reasoning_chars(self) -> int:
        """Characters of the answer up to the end of its reasoning."""
        reader = self._reader
        return reader.reasoning_chars if isinstance(reader, ReasoningReader | HarmonyReader) else 0

    @property
    def has_calls(self) -> bool:
        return any(item.kind is ItemKind.CALL and not item.malformed for item in self.items)

    def read(self, chunks: Sequence[ChoiceChunk]) -> list[Step]:
        """What chunks change, and at the end of the answer also what was held back. If a limit ends
        it, its last item is incomplete."""
        reason = chunks[-1].reason
        steps = [step for part in self._read_parts(chunks) for step in self._add(part)]
        return steps if reason is None else [*steps, *self._close(reason is FinishReason.STOP)]

    def _read_parts(self, chunks: Sequence[ChoiceChunk]) -> Iterator[AnswerPart]:
        for text in self._divide(chunks):
            yield from self._reader.feed(text)
        reason = chunks[-1].reason
        if reason is not None:
            yield from self._reader.finish(cut=reason is not FinishReason.STOP)

    def _divide(self, chunks: Sequence[ChoiceChunk]) -> Iterator[str]:
        """The text of chunks, token by token if their scores are wanted."""
        if self._scores is None:
            yield "".join(chunk.text for chunk in chunks)
            return
        for chunk in chunks:
            yield from self._scores.split(chunk)

    def _add(self, part: AnswerPart) -> Iterable[Step]:
        match part:
            case Content(text):
                return self._grow(ItemKind.CONTENT, text)
            case Reasoning(text):
                return self._grow(ItemKind.REASONING, text)
            case ToolCallStart(_, call_id, name):
                return [*self._close(), self._start(ItemKind.CALL, call_id, name)]
            case ToolCallArguments(_, text):
                return self._grow(ItemKind.CALL, text)
            case ToolCallMalformed(_, text):
                if self._open is not None:
                    self._open.malformed = True
                return [*self._close(complete=False), *self._grow(ItemKind.CONTENT, text)]

    def _grow(self, kind: ItemKind, text: str) -> Iterator[Step]:
        if not text:
            return
        if self._open is None or self._open.kind is not kind:
            yield from self._close()
            yield self._start(kind)
        assert self._open is not None
        self._open.pieces.append(text)
        scores = self._find_scores(kind, text)
        self._open.scores += scores
        yield Grown(self._open, text, scores)

    def _find_scores(self, kind: ItemKind, text: str) -> Sequence[Logprob]:
        """The scores of content. The tokens of a call stay: it may turn out to be content."""
        if self._scores is None or kind is ItemKind.CALL:
            return ()
        found = self._scores.take(text)
        return found if kind is ItemKind.CONTENT else ()

    def _start(self, kind: ItemKind, call_id: str = "", name: str = "") -> Step:
        self._open = Item(len(self.items), kind, call_id, name)
        self.items.append(self._open)
        return Started(self._open)

    def _close(self, complete: bool = True) -> Iterator[Step]:
        item, self._open = self._open, None
        if item is not None:
            item.complete = complete
            yield Ended(item)
