"""The scored tokens of each part of an answer. Pure."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.requests.incremental import AnswerDetokenizer
from gateway.sessions.session import ChoiceChunk, Logprob


@dataclass(frozen=True, slots=True)
class ScoredText:
    """The text that a token completes. A token that ends within a character has none."""

    text: str
    score: Logprob | None  # None: of text that is not sampled, or that is counted already


class TokenScores:
    """Finds the tokens of the parts that a reader makes of an answer.

    A reader leaves out marks and holds text back. So it reads the answer token by token, and a part
    is looked for in what it has read since the last part.
    """

    def __init__(self, detokenizer: AnswerDetokenizer):
        """`detokenizer`: one of the answer that has no tokens yet."""
        self._detokenizer = detokenizer
        self._waiting: deque[ScoredText] = deque()  # their text may be part of a stop string
        self._read: list[ScoredText] = []  # that are in no part yet

    def split(self, chunk: ChoiceChunk) -> Iterator[str]:
        """The text of a chunk, token by token."""
        self._waiting += self._decode(chunk)
        text = chunk.text
        while self._waiting and len(self._waiting[0].text) <= len(text):
            token = self._waiting.popleft()
            self._read.append(token)
            if token.text:
                text = text[len(token.text) :]
                yield token.text
        if text:
            yield self._read_rest(text)

    def take(self, part: str) -> Sequence[Logprob]:
        """The tokens of the next part. O(tokens since the last part)."""
        joined = "".join(token.text for token in self._read)
        begin = joined.rfind(part)
        begin, end = (begin, begin + len(part)) if begin >= 0 else (0, len(joined))
        found: list[Logprob] = []
        rest: list[ScoredText] = []
        at = 0
        for token in self._read:
            until = at + len(token.text)
            inside = at < end and (until > begin or at == begin)
            if inside and token.score is not None:
                found.append(token.score)
            if at >= end:
                rest.append(token)
            elif until > end:
                rest.append(ScoredText(token.text[end - at :], None))
            at = until
        self._read = rest
        return found

    def _decode(self, chunk: ChoiceChunk) -> Iterator[ScoredText]:
        """The chunk's tokens. Those that the gateway has put in have no score."""
        scores = deque(chunk.logprobs)
        for token_id in chunk.token_ids:
            scored = bool(scores) and scores[0].token_id == token_id
            score = scores.popleft() if scored else None
            yield ScoredText(self._detokenizer.feed((token_id,)), score)

    def _read_rest(self, text: str) -> str:
        """Reads text that ends within a token, or that no token completes."""
        score = None
        if self._waiting:
            token = self._waiting.popleft()
            score = token.score
            self._waiting.appendleft(ScoredText(token.text[len(text) :], None))
        self._read.append(ScoredText(text, score))
        return text
