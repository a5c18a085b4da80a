"""Log-probabilities in the two shapes OpenAI has for them."""

from collections.abc import Sequence

from gateway.requests.text import Text
from gateway.sessions.session import Logprob

Entry = dict[str, object]


def chat_logprobs(text: Text, logprobs: Sequence[Logprob]) -> Entry:
    """Of `chat.completions`: each token with its bytes, and its likeliest rivals."""
    return {"content": [_chat_entry(text, item) for item in logprobs], "refusal": None}


def completion_logprobs(
    text: Text, logprobs: Sequence[Logprob], offset_chars: int
) -> tuple[Entry, int]:
    """Of `completions`: columns, one row a token; and the offset behind the last token."""
    tokens, offsets = [text.token_text(item.token_id) for item in logprobs], []
    for token in tokens:
        offsets.append(offset_chars)
        offset_chars += len(token)
    entry: Entry = {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": [
            {
                text.token_text(token_id): value
                for token_id, value in zip(item.top_ids, item.top_logprobs, strict=False)
            }
            for item in logprobs
        ],
        "text_offset": offsets,
    }
    return entry, offset_chars


def _chat_entry(text: Text, item: Logprob) -> Entry:
    rivals = zip(item.top_ids, item.top_logprobs, strict=False)
    top = [_token(text, token_id, logprob) for token_id, logprob in rivals]
    return {**_token(text, item.token_id, item.logprob), "top_logprobs": top}


def _token(text: Text, token_id: int, logprob: float) -> Entry:
    return {
        "token": text.token_text(token_id),
        "logprob": logprob,
        "bytes": list(text.token_bytes(token_id)),
    }
