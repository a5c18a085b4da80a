"""The chunks of a complete answer, as the clients' `Answer`."""

from collections.abc import Iterable

from foretoken.client.answers import Answer, Choice, Logprob, Usage
from gateway.faces.http.offline.requests import Chunks
from gateway.sessions.call import ClientCall
from gateway.sessions.session import Logprob as SentLogprob


def to_answer(call: ClientCall, chunks: Chunks) -> Answer:
    """Choices in order, and the usage of all together."""
    choices = [
        Choice(
            "".join(chunk.text for chunk in parts),
            [token for chunk in parts for token in chunk.token_ids],
            _logprobs(item for chunk in parts for item in chunk.logprobs),
            parts[-1].reason,
            _logprobs(item for chunk in parts for item in chunk.prompt_logprobs),
        )
        for parts in chunks
    ]
    usage = Usage(call.prompt_tokens, call.completion_tokens, call.cached_tokens)
    return Answer(call.answer_id, choices, usage)


def _logprobs(items: Iterable[SentLogprob]) -> list[Logprob]:
    return [
        Logprob(p.token_id, p.logprob, dict(zip(p.top_ids, p.top_logprobs, strict=False)))
        for p in items
    ]
