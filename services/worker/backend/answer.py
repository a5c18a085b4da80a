"""BackendAnswer: the tokens of one answer, from a server's events. Pure."""

from collections import deque
from collections.abc import Iterable

from tokenizers import Tokenizer

from services.core import FinishReason
from services.worker.backend.dialect import Dialect, Event, decode_event
from services.worker.backend.requests import Arrival
from services.worker.backend.retokenizer import Retokenizer

DONE = b"[DONE]"
ANOTHER = (
    "the answer follows a schema or grammar and had to begin anew at a backend, which gave another "
    "one; ask again"
)


class BackendAnswer:
    """Reads events until the answer has `ended`. Every end comes with a token: where a server sends
    none, because it leaves out the end token or returns text, it is `eos_id`."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer, eos_id: int):
        self.ended = False
        self._tokenizer = tokenizer
        self._eos_id = eos_id
        self._retokenizer = None if dialect.returns_ids else Retokenizer(tokenizer)

    def read(self, data: bytes) -> list[Arrival]:
        """The tokens of an event. Raises ValueError with a sentence for an event that is not one of
        OpenAI's format, for a reported error, and for an answer that was cut off."""
        if self.ended or data == DONE:
            return []
        event = decode_event(data, self._find_token)
        if event is None:
            return []
        if event.ended and event.reason is None:
            raise ValueError("the backend cut the answer off")
        arrivals = self._arrivals(event)
        if event.reason is not None:
            self.ended = True
            return self._close(arrivals, event.reason)
        return arrivals

    def read_all(self, events: Iterable[bytes]) -> tuple[list[Arrival], str]:
        """The tokens of events up to the first one for which `read` raises, and its sentence;
        empty if there is none."""
        arrivals: list[Arrival] = []
        try:
            for data in events:
                arrivals += self.read(data)
        except ValueError as error:
            return arrivals, str(error)
        return arrivals, ""

    def _arrivals(self, event: Event) -> list[Arrival]:
        if self._retokenizer is not None:
            return _as_arrivals(self._retokenizer.feed(event.text))
        if event.token_ids is None:
            if event.text:
                raise ValueError("the backend no longer returns token ids")
            return []
        if len(event.logprobs) == len(event.token_ids):
            return list(map(Arrival, event.token_ids, event.logprobs))
        return _as_arrivals(event.token_ids)

    def _close(self, arrivals: list[Arrival], reason: FinishReason) -> list[Arrival]:
        """Lets the last token end the answer. Text without its end token gets it."""
        if self._retokenizer is not None:
            arrivals += _as_arrivals(self._retokenizer.flush())
        if not arrivals or (self._retokenizer is not None and reason is FinishReason.STOP):
            arrivals.append(Arrival(self._eos_id))
        arrivals[-1] = arrivals[-1]._replace(reason=reason)
        return arrivals

    def _find_token(self, text: str) -> int | None:
        """The token with this text, if it is a single one."""
        ids = Retokenizer(self._tokenizer).feed(text)
        return ids[0] if len(ids) == 1 else None


class Replay:
    """Leaves out of an answer that a server begins anew the tokens that its client has."""

    def __init__(self, known: Iterable[int]):
        self._known = deque(known)

    def skip(self, arrivals: list[Arrival]) -> list[Arrival]:
        """Those behind the known ones. Raises ValueError with a sentence for another answer."""
        for at, arrival in enumerate(arrivals):
            if not self._known:
                return arrivals[at:]
            if arrival.token_id != self._known.popleft() or arrival.reason is not None:
                raise ValueError(ANOTHER)
        return []


def _as_arrivals(ids: Iterable[int]) -> list[Arrival]:
    return [Arrival(token) for token in ids]
