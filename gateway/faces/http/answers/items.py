"""The parts of one answer as items: runs of content or of reasoning, and tool calls. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from gateway.readers.content import ContentReader
from gateway.readers.harmony import HarmonyReader
from gateway.readers.reasoning import ReasoningReader
from gateway.sessions.call import LiveChoice
from gateway.sessions.session import ChoiceChunk
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

    @property
    def is_content(self) -> bool:
        return self.item.kind is ItemKind.CONTENT


@dataclass(frozen=True, slots=True)
class Ended:
    item: Item


Step = Started | Grown | Ended


class AnswerItems:
    """Divides the text of one answer into items, in their order; one is open at a time."""

    def __init__(self, reader: AnswerReader | None):
        """`reader`: None if the text is content as it is."""
        self._reader = reader or ContentReader()
        self._open: Item | None = None
        self.items: list[Item] = []

    @classmethod
    def of(cls, live: LiveChoice) -> "AnswerItems":
        """The items of a choice."""
        opened = live.request.open_reader
        return cls(opened() if opened else None)

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
        parts = [*self._reader.feed("".join(chunk.text for chunk in chunks))]
        if reason is not None:
            parts += self._reader.finish(cut=reason is not FinishReason.STOP)
        steps = [step for part in parts for step in self._add(part)]
        return steps if reason is None else [*steps, *self._close(reason is FinishReason.STOP)]

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
        yield Grown(self._open, text)

    def _start(self, kind: ItemKind, call_id: str = "", name: str = "") -> Step:
        self._open = Item(len(self.items), kind, call_id, name)
        self.items.append(self._open)
        return Started(self._open)

    def _close(self, complete: bool = True) -> Iterator[Step]:
        item, self._open = self._open, None
        if item is not None:
            item.complete = complete
            yield Ended(item)
