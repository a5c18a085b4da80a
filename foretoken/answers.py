"""What a client gets back, and the request it sends: plain values around the messages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from protos import common_pb2, gateway_pb2
from services.core import FinishReason
from services.runtime.codec import decode_reason

SLA_BUDGETS = ("ttft_s", "tpot_s", "mtpot_s")


class SamplingOptions(TypedDict, total=False):
    """Keyword arguments of `generate` and `complete`; what is left out has its default."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    n: int


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability and those of its likeliest rivals, by token id."""

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class Chunk:
    """What has been added to one choice; `finish_reason` is set on its last chunk."""

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] = ()
    finish_reason: FinishReason | None = None


@dataclass
class Choice:
    """One whole answer."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.finish_reason = chunk.finish_reason


@dataclass(frozen=True)
class Answer:
    """All choices of a request; `text` and `finish_reason` are the first's."""

    request_id: str
    choices: Sequence[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason


def make_request(
    prompt: str | None,
    messages: Iterable[Mapping[str, str]] | None,
    tokens: Iterable[int] | None,
    model: str,
    sla: str | Mapping[str, float] | None,
    application: str,
    cache_salt: str,
    sampling: SamplingOptions,
) -> gateway_pb2.GenerateRequest:
    """Raises TypeError or ValueError for what no message can carry; ranges the server checks."""
    if sum(given is not None for given in (prompt, messages, tokens)) != 1:
        raise TypeError("give exactly one of prompt, messages and tokens")
    options: dict[str, Any] = dict(sampling)
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    request = gateway_pb2.GenerateRequest(
        model=model,
        application=application,
        cache_salt=cache_salt,
        sampling=common_pb2.Sampling(**options),
    )
    if prompt is not None:
        request.prompt = prompt
    elif tokens is not None:
        request.prompt_tokens.CopyFrom(gateway_pb2.TokenIds(ids=tokens))
    elif messages is not None:
        turns = [gateway_pb2.ChatMessage(**message) for message in messages]
        request.chat.CopyFrom(gateway_pb2.Chat(messages=turns))
    if sla is not None:
        request.sla.CopyFrom(_sla(sla))
    return request


def decode_chunk(response: gateway_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        response.index,
        response.text,
        list(response.token_ids),
        [
            Logprob(p.token_id, p.logprob, dict(zip(p.top_ids, p.top_logprobs, strict=False)))
            for p in response.logprobs
        ],
        decode_reason(response.finish_reason),
    )


def decode_usage(usage: gateway_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens)


def assemble(request_id: str, chunks: Iterable[Chunk], usage: Usage | None) -> Answer:
    """All chunks of a finished call as one answer."""
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        choices.setdefault(chunk.index, Choice()).add(chunk)
    ordered = [choices[index] for index in sorted(choices)]
    return Answer(request_id, ordered, usage or Usage(0, 0))


def _sla(sla: str | Mapping[str, float]) -> common_pb2.Sla:
    if isinstance(sla, str):
        return common_pb2.Sla(name=sla)
    unknown = sorted(sla.keys() - {*SLA_BUDGETS})
    if unknown:
        raise TypeError(f"unknown SLA budget {unknown[0]}; known: {', '.join(SLA_BUDGETS)}")
    return common_pb2.Sla(**dict[str, Any](sla))
