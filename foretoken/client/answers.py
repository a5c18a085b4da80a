"""Requests and answers of the clients, as plain values."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from protos.generated import common_pb2, gateway_pb2
from services.core import FinishReason
from services.runtime.codecs.common import decode_reason

SLA_BUDGETS = ("ttft_s", "tpot_s", "mtpot_s")


class SamplingOptions(TypedDict, total=False):
    """Sampling arguments of `generate` and `complete`; missing ones have the server's defaults."""

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
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    prompt_logprobs: int
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    grammar: str  # EBNF with the rule `root`, or llguidance's variant of Lark with `start`


class RequestOptions(SamplingOptions, total=False):
    """Sampling arguments and request options.

    application: groups requests with similar output lengths. cache_salt: only requests with the
    same salt share cached prefixes. user: the tenant, if there is no salt. priority: lower goes
    first. request_id: id of the answer. include_forecast: chunks carry a length forecast.
    truncate_prompt_tokens: keeps the last tokens of the prompt; -1 keeps what fits. The last three
    are for the chat template.
    """

    application: str
    cache_salt: str
    user: str
    priority: int
    request_id: str
    include_forecast: bool
    truncate_prompt_tokens: int
    add_special_tokens: bool
    chat_template_kwargs: Mapping[str, object]
    add_generation_prompt: bool
    continue_final_message: bool


TEMPLATE_OPTIONS = ("add_generation_prompt", "continue_final_message")
OWN_OPTIONS = RequestOptions.__annotations__.keys() - SamplingOptions.__annotations__.keys()


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # prompt tokens found in the prefix cache


@dataclass(frozen=True)
class Logprob:
    """Log-probability of a token, and of the most likely tokens by id."""

    token_id: int
    logprob: float
    top: Mapping[int, float]


@dataclass(frozen=True)
class Forecast:
    """Forecast of a choice: its length with a 90 % interval, and the seconds to its end.

    ttft_s: promised time to first token from arrival, kept by about 90 %; sla_expected: whether the
    SLA is expected to be met. Both are None once text has arrived.
    """

    expected_tokens: float
    low_tokens: int
    high_tokens: int
    end_s: float
    ttft_s: float | None = None
    sla_expected: bool | None = None


@dataclass(frozen=True)
class Chunk:
    """New text of one choice. The last chunk has a `finish_reason`.

    forecast: if requested and known, possibly before any text. prompt_logprobs: if requested, with
    the first tokens, for every prompt token except the first.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[Logprob] = ()
    finish_reason: FinishReason | None = None
    forecast: Forecast | None = None
    prompt_logprobs: Sequence[Logprob] = ()


@dataclass
class Choice:
    """One complete choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[Logprob] = field(default_factory=list)

    def add(self, chunk: Chunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        self.prompt_logprobs += chunk.prompt_logprobs
        self.finish_reason = chunk.finish_reason


@dataclass(frozen=True)
class Answer:
    """All choices of a request; `text` and `finish_reason` are those of the first."""

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
    given: RequestOptions,
) -> gateway_pb2.GenerateRequest:
    """Builds the gRPC request. Raises TypeError or ValueError for invalid types.

    The server checks ranges.
    """
    if sum(given is not None for given in (prompt, messages, tokens)) != 1:
        raise TypeError("give exactly one of prompt, messages and tokens")
    options: dict[str, Any] = {**given}
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    template = {name: options.pop(name) for name in TEMPLATE_OPTIONS if name in options}
    if template_kwargs := options.pop("chat_template_kwargs", None):
        template["template_kwargs_json"] = json.dumps(dict(template_kwargs))
    if template and messages is None:
        raise TypeError(f"{next(iter(template))} requires messages")
    own = {name: options.pop(name) for name in list(options) if name in OWN_OPTIONS}
    request = gateway_pb2.GenerateRequest(
        model=model, sampling=common_pb2.Sampling(**options), **own
    )
    if prompt is not None:
        request.prompt = prompt
    elif tokens is not None:
        request.prompt_tokens.CopyFrom(common_pb2.TokenIds(ids=tokens))
    elif messages is not None:
        turns = [gateway_pb2.ChatMessage(**message) for message in messages]
        request.chat.CopyFrom(gateway_pb2.Chat(messages=turns, **template))
    if sla is not None:
        request.sla.CopyFrom(_sla(sla))
    return request


def decode_chunk(response: gateway_pb2.GenerateResponse) -> Chunk:
    return Chunk(
        response.index,
        response.text,
        list(response.token_ids),
        _logprobs(response.logprobs),
        decode_reason(response.finish_reason),
        _forecast(response.forecast) if response.HasField("forecast") else None,
        _logprobs(response.prompt_logprobs),
    )


def _logprobs(items: Iterable[common_pb2.TokenLogprob]) -> list[Logprob]:
    return [
        Logprob(p.token_id, p.logprob, dict(zip(p.top_ids, p.top_logprobs, strict=False)))
        for p in items
    ]


def _forecast(message: gateway_pb2.ClientForecast) -> Forecast:
    return Forecast(
        message.expected_tokens,
        message.low_tokens,
        message.high_tokens,
        message.end_s,
        message.ttft_s if message.HasField("ttft_s") else None,
        message.sla_expected if message.HasField("sla_expected") else None,
    )


def decode_usage(usage: gateway_pb2.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)


def assemble(request_id: str, chunks: Iterable[Chunk], usage: Usage | None) -> Answer:
    """Joins all chunks of a finished call."""
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
