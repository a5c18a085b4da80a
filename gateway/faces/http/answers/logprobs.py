"""Log-probabilities in the shapes OpenAI has for them, and vLLM for those of a prompt."""

from collections.abc import Iterator, Sequence

from gateway.requests.sampling import Sampling
from gateway.requests.text import Text
from gateway.sessions.session import Logprob
from services.runtime.errors import Code, ServiceError

Entry = dict[str, object]

LEAST = -9999.0  # what can't be drawn at all: JSON has no infinity
VERBATIM = Sampling(seed=0, max_tokens=1, skip_special_tokens=False)


def chat_logprobs(text: Text, logprobs: Sequence[Logprob]) -> Entry:
    """Of `chat.completions`: each token with its bytes, and its likeliest rivals."""
    return {"content": [_chat_entry(text, item) for item in logprobs], "refusal": None}


class Columns:
    """Of one choice of `completions`: columns of one row a token, in the pieces in which it comes.

    A token's offset is where its text begins in the choice's, counted in characters; one that
    completes a character begins where the character does.
    """

    def __init__(self, text: Text, sampling: Sampling, rivals: int):
        self._text, self._rivals = text, rivals
        self._detokenizer = text.detokenizer(sampling)
        self._at = 0

    def echo(self, ids: Sequence[int], scored: Sequence[Logprob], literal: str) -> Entry:
        """The prompt's rows, before any other: nothing foretells its first token, and one that is
        not in the text that the client has sent, as BOS, takes no room in it."""
        detokenizer, offsets = self._text.detokenizer(VERBATIM), []
        for token_id in ids:
            offsets.append(self._at)
            piece = detokenizer.feed((token_id,))
            if literal.startswith(piece, self._at):
                self._at += len(piece)
        self._at = len(literal)
        return self._entry([*ids], [None, *all_scored(ids, scored)], offsets)

    def add(self, logprobs: Sequence[Logprob]) -> Entry:
        """The answer's next."""
        ids, offsets = [item.token_id for item in logprobs], []
        for token_id in ids:
            offsets.append(self._at)
            self._at += len(self._detokenizer.feed((token_id,)))
        return self._entry(ids, logprobs, offsets)

    def _entry(
        self, ids: Sequence[int], items: Sequence[Logprob | None], offsets: Sequence[int]
    ) -> Entry:
        return {
            "tokens": [self._text.token_text(token_id) for token_id in ids],
            "token_logprobs": [_own(item) for item in items],
            "top_logprobs": [self._top(item) for item in items],
            "text_offset": offsets,
        }

    def _top(self, item: Logprob | None) -> Entry | None:
        """By their texts, of which several tokens may have the same: the likeliest counts. The
        token itself is among them, as at OpenAI."""
        if item is None:
            return None
        top: Entry = {}
        for token_id, logprob in _likeliest(item, self._rivals):
            top.setdefault(self._text.token_text(token_id), max(logprob, LEAST))
        top.setdefault(self._text.token_text(item.token_id), max(item.logprob, LEAST))
        return top


def joined(first: Entry, second: Entry) -> Entry:
    """The rows of two pieces."""
    return {name: [*_rows(first, name), *_rows(second, name)] for name in first}


def prompt_logprobs(
    text: Text, ids: Sequence[int], scored: Sequence[Logprob], rivals: int
) -> list[Entry | None]:
    """As vLLM has them: of each token of the prompt but the first its own and its likeliest
    rivals', by their ids. The rank of one that is not among the likeliest is not known."""
    return [None, *(_by_id(text, item, rivals) for item in all_scored(ids, scored))]


def all_scored(ids: Sequence[int], scored: Sequence[Logprob]) -> Sequence[Logprob]:
    """What the worker sent of a prompt. Raises ServiceError where that is not all."""
    if len(scored) != len(ids) - 1:
        told = f"the worker scored {len(scored)} of {len(ids) - 1} tokens of the prompt"
        raise ServiceError(Code.INTERNAL, told)
    return scored


def _by_id(text: Text, item: Logprob, rivals: int) -> Entry:
    top = list(_likeliest(item, rivals))
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(top, 1)}
    pairs = {item.token_id: item.logprob, **dict(top)}
    return {
        str(token_id): {
            "logprob": max(logprob, LEAST),
            "rank": ranks.get(token_id),
            "decoded_token": text.token_text(token_id),
        }
        for token_id, logprob in pairs.items()
    }


def _own(item: Logprob | None) -> float | None:
    return None if item is None else max(item.logprob, LEAST)


def _likeliest(item: Logprob, most: int) -> Iterator[tuple[int, float]]:
    return zip(item.top_ids[:most], item.top_logprobs[:most], strict=False)


def _rows(entry: Entry, name: str) -> Sequence[object]:
    rows = entry[name]
    assert isinstance(rows, list)
    return rows


def _chat_entry(text: Text, item: Logprob) -> Entry:
    rivals = zip(item.top_ids, item.top_logprobs, strict=False)
    top = [_token(text, token_id, logprob) for token_id, logprob in rivals]
    return {**_token(text, item.token_id, item.logprob), "top_logprobs": top}


def _token(text: Text, token_id: int, logprob: float) -> Entry:
    return {
        "token": text.token_text(token_id),
        "logprob": max(logprob, LEAST),
        "bytes": list(text.token_bytes(token_id)),
    }
