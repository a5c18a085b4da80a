"""Log-probabilities in OpenAI's formats, and those of a prompt in vLLM's."""

from collections.abc import Iterator, Sequence
from typing import Any

from gateway.requests.text import Text
from gateway.sessions.session import Logprob
from gateway.types.generation import Sampling
from services.runtime.errors import Code, ServiceError

Entry = dict[str, object]
Columns = dict[str, list[Any]]

MIN_LOGPROB = -9999.0  # for impossible tokens: JSON has no infinity
VERBATIM = Sampling(seed=0, max_tokens=1, skip_special_tokens=False)


def encode_chat_logprobs(text: Text, logprobs: Sequence[Logprob]) -> Entry:
    """`logprobs` of a chat choice: each token with its bytes and its most likely alternatives."""
    return {"content": encode_scores(text, logprobs), "refusal": None}


def encode_scores(text: Text, logprobs: Sequence[Logprob]) -> list[Entry]:
    """Each token with its bytes and its most likely alternatives."""
    return [_encode_chat_entry(text, item) for item in logprobs]


class LogprobColumns:
    """`logprobs` of one completion choice, as columns with one row per token, built in pieces.

    The offset of a token is where its text begins in the choice, in characters. A token that
    completes a character begins where the character begins.
    """

    def __init__(self, text: Text, sampling: Sampling, top_n: int):
        self._text, self._top_n = text, top_n
        self._detokenizer = text.detokenizer(sampling)
        self._offset = 0

    def encode_prompt(self, ids: Sequence[int], scores: Sequence[Logprob], literal: str) -> Columns:
        """The rows of an echoed prompt. Its first token has no score. A token that is not in
        `literal`, the client's text, such as BOS, has no width."""
        detokenizer, offsets = self._text.detokenizer(VERBATIM), []
        for token_id in ids:
            offsets.append(self._offset)
            piece = detokenizer.feed((token_id,))
            if literal.startswith(piece, self._offset):
                self._offset += len(piece)
        self._offset = len(literal)
        return self._encode_rows([*ids], [None, *check_scores(ids, scores)], offsets)

    def encode_answer(self, logprobs: Sequence[Logprob]) -> Columns:
        """The rows of the next tokens of the answer."""
        ids, offsets = [item.token_id for item in logprobs], []
        for token_id in ids:
            offsets.append(self._offset)
            self._offset += len(self._detokenizer.feed((token_id,)))
        return self._encode_rows(ids, logprobs, offsets)

    def _encode_rows(
        self, ids: Sequence[int], items: Sequence[Logprob | None], offsets: list[int]
    ) -> Columns:
        return {
            "tokens": [self._text.token_text(token_id) for token_id in ids],
            "token_logprobs": [_clamp_or_none(item) for item in items],
            "top_logprobs": [self._encode_top(item) for item in items],
            "text_offset": offsets,
        }

    def _encode_top(self, item: Logprob | None) -> Entry | None:
        """Scores by token text; of several tokens with one text, the most likely. As at OpenAI,
        the token itself is included."""
        if item is None:
            return None
        top: Entry = {}
        for token_id, logprob in _select_top(item, self._top_n):
            top.setdefault(self._text.token_text(token_id), max(logprob, MIN_LOGPROB))
        top.setdefault(self._text.token_text(item.token_id), max(item.logprob, MIN_LOGPROB))
        return top


def join_columns(first: Columns, second: Columns) -> Columns:
    """The rows of two pieces."""
    return {name: [*first[name], *second[name]] for name in first}


def encode_prompt_logprobs(
    text: Text, ids: Sequence[int], scores: Sequence[Logprob], top_n: int
) -> list[Entry | None]:
    """vLLM's `prompt_logprobs`: scores by token id for each token but the first. The rank of a
    token outside the `top_n` most likely is unknown."""
    return [None, *(_encode_by_id(text, item, top_n) for item in check_scores(ids, scores))]


def check_scores(ids: Sequence[int], scores: Sequence[Logprob]) -> Sequence[Logprob]:
    """The worker's scores of a prompt. Raises ServiceError if some are missing."""
    if len(scores) != len(ids) - 1:
        message = f"the worker scored {len(scores)} of {len(ids) - 1} tokens of the prompt"
        raise ServiceError(Code.INTERNAL, message)
    return scores


def _encode_by_id(text: Text, item: Logprob, top_n: int) -> Entry:
    top = list(_select_top(item, top_n))
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, 1)}
    pairs = {item.token_id: item.logprob, **dict(top)}
    return {
        str(token_id): {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": ranks.get(token_id),
            "decoded_token": text.token_text(token_id),
        }
        for token_id, logprob in pairs.items()
    }


def _clamp_or_none(item: Logprob | None) -> float | None:
    return None if item is None else max(item.logprob, MIN_LOGPROB)


def _select_top(item: Logprob, top_n: int) -> Iterator[tuple[int, float]]:
    return zip(item.top_ids[:top_n], item.top_logprobs[:top_n], strict=False)


def _encode_chat_entry(text: Text, item: Logprob) -> Entry:
    pairs = zip(item.top_ids, item.top_logprobs, strict=False)
    top = [_encode_token(text, token_id, logprob) for token_id, logprob in pairs]
    return {**_encode_token(text, item.token_id, item.logprob), "top_logprobs": top}


def _encode_token(text: Text, token_id: int, logprob: float) -> Entry:
    return {
        "token": text.token_text(token_id),
        "logprob": max(logprob, MIN_LOGPROB),
        "bytes": list(text.token_bytes(token_id)),
    }
