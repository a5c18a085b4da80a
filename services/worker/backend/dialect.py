"""What is sent to an OpenAI-compatible server, and what its events mean. Pure.

`/v1/completions` with the prompt as token ids is what vLLM, SGLang, llama.cpp and foretoken have in
common. A server that takes only text gets the prompt's text. A server that returns no token ids has
its text tokenized again (retokenizer.py).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.core import FinishReason
from services.worker.backend.constraints import encode_constraint, find_constraint_refusal
from services.worker.requests.types.batch import TokenLogprobs
from services.worker.requests.types.prompt import Prompt, SamplingParams

Decode = Callable[[Sequence[int]], str]
Fields = dict[str, Any]

SEED_LIMIT = 2**31  # llama.cpp reads 32 bits; smaller seeds stay as they are
NAME_IDS = {"return_tokens_as_token_ids": True}
TOKEN_ID = "token_id:"  # how vLLM writes a token with NAME_IDS
TOKEN_LIMIT = 2**32  # token ids are uint32 between the services


@dataclass(frozen=True, slots=True)
class Dialect:
    """What a server understands, as its answer to a probe shows."""

    takes_ids: bool = True  # a prompt of token ids; else its text
    returns_ids: bool = True  # token ids of the answer
    names_ids: bool = False  # NAME_IDS: ids of the alternatives; their texts may be ambiguous
    constraints: str = ""  # the name of its style in constraints.py; empty: it has none of these
    # Tokens behind which constraints apply; empty: from the first token.
    reasoning_end: tuple[int, ...] = ()

    def __str__(self) -> str:
        prompt = "token ids" if self.takes_ids else "text"
        answers = "token ids" if self.returns_ids else "text"
        constraints = (self.constraints or "none") + " behind reasoning" * bool(self.reasoning_end)
        return f"prompts as {prompt}, answers as {answers}, constraints by {constraints}"


@dataclass(frozen=True, slots=True)
class Event:
    """The content of one event of an answer. `token_ids` is None if the server returns none.
    `ended`: whether it finishes the answer, with `reason` None if it was cut off."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    ended: bool = False
    reason: FinishReason | None = None


# How a server's finish reasons end an answer; others, such as abort, mean that it was cut off.
REASONS: Mapping[str, FinishReason] = {
    "stop": FinishReason.STOP,
    "eos_token": FinishReason.STOP,  # TGI's own
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}


@dataclass(frozen=True, slots=True)
class Mapped:
    """A field of the request body. `encode` gets the sampling parameters and the number of output
    tokens that the prompt has already; the field is sent if the value is not `neutral`, because
    servers refuse fields that they do not know."""

    encode: Callable[[SamplingParams, int], Any]
    neutral: Any = None


FIELDS: Mapping[str, Mapped] = {
    "temperature": Mapped(lambda s, _: s.temperature),
    "top_p": Mapped(lambda s, _: s.top_p, 1.0),
    "top_k": Mapped(lambda s, _: s.top_k, 0),
    "min_p": Mapped(lambda s, _: s.min_p, 0.0),
    "seed": Mapped(lambda s, _: s.seed % SEED_LIMIT if s.temperature else None),
    # Nothing can follow what completes a grammar.
    "min_tokens": Mapped(
        lambda s, delivered: 0 if s.grammar else max(0, s.min_tokens - delivered), 0
    ),
    "ignore_eos": Mapped(lambda s, _: s.ignore_eos and not s.grammar, False),
    "repetition_penalty": Mapped(lambda s, _: s.repetition_penalty, 1.0),
    "presence_penalty": Mapped(lambda s, _: s.presence_penalty, 0.0),
    "frequency_penalty": Mapped(lambda s, _: s.frequency_penalty, 0.0),
    "logprobs": Mapped(lambda s, _: s.logprobs),
    "stop_token_ids": Mapped(lambda s, _: list(s.stop_token_ids), []),
    "logit_bias": Mapped(lambda s, _: {str(token): bias for token, bias in s.logit_bias}, {}),
    "allowed_token_ids": Mapped(lambda s, _: list(s.allowed_token_ids), []),
}


def find_refusal(prompt: Prompt, dialect: Dialect) -> str:
    """Why a server of this dialect cannot answer a prompt as asked; empty if it can."""
    sampling = prompt.sampling
    if sampling.prompt_logprobs is not None:
        return "prompt_logprobs are not available: a backend does not stream them"
    if sampling.logprobs is not None and not dialect.returns_ids:
        return "logprobs are not available: the backend does not say to which tokens they belong"
    return find_constraint_refusal(sampling, dialect.constraints, dialect.reasoning_end)


def encode_request(
    prompt: Prompt, tokens: Sequence[int], dialect: Dialect, model: str, decode: Decode
) -> Fields:
    """The body that continues `tokens`, prompt and output so far, up to the prompt's max_tokens.
    `decode` gives the text of tokens, with special ones. No server continues an answer that follows
    a grammar: such `tokens` end where the grammar, or the reasoning before it, begins."""
    delivered = len(tokens) - prompt.prompt_tokens
    body: Fields = {
        "model": model,
        "prompt": list(tokens) if dialect.takes_ids else decode(tokens),
        "max_tokens": prompt.max_tokens - delivered,
        "stream": True,
    }
    for name, field in FIELDS.items():
        value = field.encode(prompt.sampling, delivered)
        if value is not None and value != field.neutral:
            body[name] = value
    body |= encode_constraint(prompt.sampling, dialect.constraints)
    if words := _bad_words(prompt.sampling, decode):
        body["bad_words"] = words
    if prompt.cache_salt:
        body["cache_salt"] = prompt.cache_salt
    if dialect.returns_ids:
        body["return_token_ids"] = True
    if dialect.names_ids and prompt.sampling.logprobs is not None:
        body |= NAME_IDS
    return body


def _bad_words(sampling: SamplingParams, decode: Decode) -> list[str]:
    """The gateway has made token sequences of each word, with and without a space before it, as a
    server does again."""
    return list(dict.fromkeys(decode(bad).lstrip() for bad in sampling.bad_tokens))


def decode_event(data: bytes, find_token: Callable[[str], int | None]) -> Event | None:
    """The content of an event; None for one without a choice. `find_token` returns the token with
    a text, if exactly one has it. Raises ValueError with a sentence for what is not an event of
    OpenAI's format, and for an error that the server reports within a stream."""
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("an event of the backend is not JSON") from None
    if not isinstance(message, dict):
        raise ValueError("an event of the backend is not in OpenAI's format")
    if error := message.get("error"):
        raise ValueError(describe_error(error))
    choices = message.get("choices")
    if not choices:
        return None  # only usage
    try:
        return _decode_choice(choices[0], find_token)
    except (TypeError, KeyError, AttributeError, ValueError, OverflowError):
        raise ValueError("an event of the backend is not in OpenAI's format") from None


def _decode_choice(choice: Fields, find_token: Callable[[str], int | None]) -> Event:
    ids, finish = choice.get("token_ids"), choice.get("finish_reason")
    text = choice.get("text") or ""
    if not isinstance(text, str):
        raise TypeError(text)
    return Event(
        text=text,
        token_ids=None if ids is None else tuple(map(_as_token, ids)),
        logprobs=_decode_logprobs(choice.get("logprobs"), find_token),
        ended=bool(finish),
        reason=REASONS.get(finish) if finish else None,
    )


def _decode_logprobs(
    columns: Fields | None, find_token: Callable[[str], int | None]
) -> tuple[TokenLogprobs, ...]:
    """One entry per token. Alternatives with the text of no token, or of several, are left out."""
    if not columns:
        return ()
    chosen = columns["token_logprobs"]
    tops = columns.get("top_logprobs") or [None] * len(chosen)
    return tuple(
        TokenLogprobs(float(logprob), *_named(top or {}, find_token))
        for logprob, top in zip(chosen, tops, strict=True)
    )


def _named(
    top: Mapping[str, float], find_token: Callable[[str], int | None]
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    pairs = [(_token_of(text, find_token), logprob) for text, logprob in top.items()]
    known = [(token, float(logprob)) for token, logprob in pairs if token is not None]
    known.sort(key=lambda pair: -pair[1])
    return tuple(token for token, _ in known), tuple(logprob for _, logprob in known)


def _token_of(text: str, find_token: Callable[[str], int | None]) -> int | None:
    number = text.removeprefix(TOKEN_ID)
    if number != text and number.isascii() and number.isdecimal():
        return _as_token(number)
    return find_token(text)


def _as_token(value: object) -> int:
    """A token id. Raises TypeError or ValueError for what is none."""
    if not isinstance(value, int | str) or not 0 <= (token := int(value)) < TOKEN_LIMIT:
        raise ValueError(value)
    return token


def describe_error(error: object) -> str:
    """The sentence of an error object, in the forms that servers give it."""
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    # JSON may hold halves of surrogate pairs, which no message between the services can.
    return str(error)[:500].encode(errors="replace").decode()
