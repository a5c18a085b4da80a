"""`AnswerWriter`: how an endpoint writes the answer of one call, complete or streamed."""

from collections.abc import Sequence
from typing import Protocol

from gateway.sessions.session import ChoiceChunk
from services.runtime.errors import ServiceError


class AnswerWriter(Protocol):
    """Encodes one answer: once with `encode_whole`, or as a stream with the other methods."""

    @property
    def ping(self) -> bytes:
        """What a stream sends while it has nothing else to send."""
        ...

    @property
    def slow(self) -> bool:
        """Whether a thread has to encode what is available now: it scores the tokens of a prompt,
        or waits for other processes."""
        ...

    def encode_whole(self, choices: Sequence[Sequence[ChoiceChunk]]) -> dict[str, object]:
        """The complete answer, from the chunks of each choice."""
        ...

    def encode_chunk(self, chunk: ChoiceChunk) -> bytes:
        """The events of a chunk; empty for none."""
        ...

    def encode_tail(self) -> bytes:
        """An event after the last chunk; empty for none."""
        ...

    def encode_last(self, error: ServiceError | None) -> bytes:
        """What ends the stream, after all events or after an error; may be empty."""
        ...
