"""The events of a streamed chat answer with tool calls or reasoning."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from gateway.faces.http.answers.chunks import ChunkWriter
from gateway.faces.http.answers.formats import AnswerFormat, ChatFormat
from gateway.faces.http.answers.parts import AnswerParts, ChoiceParts, note_content
from gateway.faces.http.schema import StreamOptions
from gateway.sessions.call import ClientCall
from gateway.sessions.session import ChoiceChunk
from gateway.types.answer_parts import AnswerPart, Content


def make_writer(
    form: AnswerFormat,
    call: ClientCall,
    labels: Mapping[str, str],
    options: StreamOptions,
    slow: bool = False,
) -> ChunkWriter:
    """The writer of an answer; a plain one if all text is content."""
    if isinstance(form, ChatFormat) and form.parts is not None:
        return PartWriter(form, form.parts, call, labels, options, slow)
    return ChunkWriter(form, call, labels, options, slow)


class PartWriter(ChunkWriter):
    """Writes an event for each part of a chunk, and one for the role before and the reason behind
    them. Once a choice has only content left, its events are those of other answers."""

    def __init__(
        self,
        form: ChatFormat,
        parts: AnswerParts,
        call: ClientCall,
        labels: Mapping[str, str],
        options: StreamOptions,
        slow: bool = False,
    ):
        super().__init__(form, call, labels, options, slow)
        self._chat, self._parts = form, parts

    def encode_chunk(self, chunk: ChoiceChunk) -> bytes:
        choice = self._parts.of(chunk.index)
        # A chunk without tokens, text and reason has only a forecast.
        if choice is None or choice.passes or not (chunk.token_ids or chunk.text or chunk.reason):
            return super().encode_chunk(chunk)
        return b"".join(self._encode_parts(chunk, choice))

    def _encode_parts(self, chunk: ChoiceChunk, choice: ChoiceParts) -> Iterator[bytes]:
        """The first event has what the chunk has besides its text."""
        rest = replace(chunk, token_ids=(), logprobs=(), forecast=None, prompt_logprobs=())
        parts = choice.read(chunk)
        self._note_content(chunk.index, parts)
        deltas = [*self._chat.open_choice(chunk.index), *self._parts.encode_deltas(parts)]
        if chunk.reason is not None or (not deltas and self._has_more(chunk)):
            deltas.append({})
        for at, delta in enumerate(deltas):
            last = at == len(deltas) - 1 and chunk.reason is not None
            reason = choice.encode_reason(chunk.reason) if last else None
            part = rest if at else chunk
            yield self._encode_choice(part, self._chat.delta_choice(part, delta, reason))

    def _has_more(self, chunk: ChoiceChunk) -> bool:
        return not self._repeats or chunk.forecast is not None

    def _note_content(self, index: int, parts: Sequence[AnswerPart]) -> None:
        if any(isinstance(part, Content) for part in parts):
            note_content(self._call.choices[index])
