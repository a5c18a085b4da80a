"""The OpenAI request bodies: how the fields that are honoured become a GenerateRequest.

`gateway.faces.http.dialect.fields` lists the fields. Types are checked here, strictly; ranges
are checked for gRPC and HTTP alike in `gateway.requests`. A field that is null counts as absent.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from gateway.faces.http.dialect.content import (
    chat_messages,
    prompt_request,
    split_prompts,
    unknown_in,
)
from gateway.faces.http.dialect.fields import (
    ALIASES,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    FieldRule,
    Handling,
)
from protos.generated import common_pb2, gateway_pb2
from services.runtime.errors import InvalidArgument

Json = Mapping[str, object]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]

DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as at OpenAI; a chat goes on as far as it can


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False  # with it: each chunk tells its choice's
    include_forecast: bool = False  # how long each choice will be, beside its chunks
    include_obfuscation: bool = False  # nothing is padded here


NO_OPTIONS = StreamOptions()
OPTIONS = StreamOptions.model_fields.keys()


class Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="forbid")
    fields: ClassVar[Mapping[str, FieldRule]]

    model: str = ""
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] = Field(default_factory=list)
    max_tokens: Int32 | None = None
    min_tokens: Int32 | None = None
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    n: Int32 = 1
    stop_token_ids: list[TokenId] | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[TokenId] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int32 | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    truncate_prompt_tokens: Int64 | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    stream: bool = False
    stream_options: StreamOptions = NO_OPTIONS
    cache_salt: str = ""  # as vLLM calls it: whose cached prefixes the prompt may share
    user: str = ""  # whose it is
    priority: Int32 = 0
    request_id: str = ""
    echo: bool = False

    _unknown: list[str] = PrivateAttr(default_factory=list)

    @property
    def unknown(self) -> Sequence[str]:
        """The names of fields in it that nobody knows."""
        return self._unknown

    @property
    def scored(self) -> int | None:
        """How many rivals of each token of the prompt are wanted; None: not even its own score."""
        return self.prompt_logprobs

    def _sampling(self, logprobs: int | None, max_tokens: int | None) -> common_pb2.Sampling:
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidArgument("allowed_token_ids", "must not be empty")
        return common_pb2.Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logprobs=logprobs,
            n=self.n,
            stop_token_ids=self.stop_token_ids,
            logit_bias=_bias(self.logit_bias) if self.logit_bias else None,
            allowed_token_ids=self.allowed_token_ids,
            bad_words=self.bad_words,
            prompt_logprobs=self.scored,
            include_stop_str_in_output=self.include_stop_str_in_output,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
        )

    def _fill(self, request: gateway_pb2.GenerateRequest, sampling: common_pb2.Sampling) -> None:
        """What does not depend on the endpoint."""
        request.model = self.model
        request.sampling.CopyFrom(sampling)
        request.cache_salt = self.cache_salt
        request.user = self.user
        request.include_forecast = self.stream_options.include_forecast
        request.priority = self.priority
        request.request_id = self.request_id
        if self.add_special_tokens is not None:
            request.add_special_tokens = self.add_special_tokens
        if self.truncate_prompt_tokens is not None:
            least, most = -(2**31), 2**31 - 1
            request.truncate_prompt_tokens = min(most, max(least, self.truncate_prompt_tokens))


class CompletionBody(Body):
    """`POST /v1/completions`."""

    fields: ClassVar[Mapping[str, FieldRule]] = COMPLETION_FIELDS

    prompt: object = None
    logprobs: Int32 | None = None

    @property
    def scored(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        if self.echo and self.max_tokens == 0 and echoed is None:
            echoed = 0
        known = [k for k in (self.prompt_logprobs, echoed) if k is not None]
        return max(known, default=None)

    def requests(self) -> list[gateway_pb2.GenerateRequest]:
        """One a prompt, all with the same sampling."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self._sampling(self.logprobs, limit)
        requests = [prompt_request(prompt) for prompt in split_prompts(self.prompt)]
        for request in requests:
            self._fill(request, sampling)
        return requests

    def texts(self) -> Sequence[str | None]:
        """Each prompt where it is a text and goes to the model whole."""
        whole = self.truncate_prompt_tokens is None
        return [p if whole and isinstance(p, str) else None for p in split_prompts(self.prompt)]


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    fields: ClassVar[Mapping[str, FieldRule]] = CHAT_FIELDS

    messages: list[object] = Field(default_factory=list)
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    max_completion_tokens: Int32 | None = None
    chat_template_kwargs: dict[str, object] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    reasoning_effort: object = None

    def requests(self) -> list[gateway_pb2.GenerateRequest]:
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        if None is not self.max_tokens != self.max_completion_tokens is not None:
            raise InvalidArgument("max_tokens", "differs from max_completion_tokens")
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        chat = gateway_pb2.Chat(
            messages=chat_messages(self.messages),
            template_kwargs_json=self._template_kwargs(),
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        request = gateway_pb2.GenerateRequest(chat=chat)
        self._fill(request, self._sampling(logprobs, limit))
        return [request]

    def _template_kwargs(self) -> str:
        """With the effort, which a template may read by either name; what a client says, counts."""
        given, effort = self.chat_template_kwargs or {}, self.reasoning_effort
        if isinstance(effort, str | int | float):
            thinks = effort != "none"
            given = {"reasoning_effort": effort, "enable_thinking": thinks, **given}
        return json.dumps(given) if given else ""


BodyT = TypeVar("BodyT", bound=Body)
ModelT = TypeVar("ModelT", bound=BaseModel)


def read_body(kind: type[BodyT], fields: Json) -> BodyT:
    """Raises InvalidArgument naming the first field that is wrong or refused. O(fields given)."""
    given, unknown = _sort(kind.fields, fields)
    unknown += unknown_in(given.get("messages"))
    options = given.get("stream_options")
    if isinstance(options, dict):
        kept = {k: v for k, v in options.items() if k in OPTIONS and v is not None}
        unknown += [f"stream_options.{name}" for name in sorted(options.keys() - OPTIONS)]
        given["stream_options"] = kept
    body = validated(kind, given)
    if given.get("stream_options") and not body.stream:
        raise InvalidArgument("stream_options", "is only allowed when stream is true")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs", "is not available with stream; echo is")
    body._unknown = unknown
    return body


def validated(kind: type[ModelT], given: Json) -> ModelT:
    """Raises InvalidArgument naming the first field that is wrong."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidArgument(*_explain(first["loc"], first["msg"])) from None


def _sort(table: Mapping[str, FieldRule], fields: Json) -> tuple[dict[str, object], list[str]]:
    """What is honoured, by our names, and the names of what is not known."""
    given: dict[str, object] = {}
    unknown: list[str] = []
    for name, value in fields.items():
        known = table.get(name)
        if value is None:
            continue
        if known is None:
            unknown.append(name)
        elif name in ALIASES:
            given.setdefault(ALIASES[name], value)
        elif known.handling is Handling.SUPPORTED:
            given[name] = value
        elif (
            known.handling is Handling.REFUSED
            and known.changes_answer(value)
            and not _as_n(name, fields)
        ):
            raise InvalidArgument(name, "is not supported here")
    return given, unknown


def _as_n(name: str, fields: Json) -> bool:
    """Whether it asks for as many answers to choose from as are chosen."""
    return name == "best_of" and fields[name] == fields.get("n")


def _explain(loc: tuple[int | str, ...], message: str) -> tuple[str, str]:
    field = str(loc[0]) if loc else ""
    inner = [str(part) for part in loc[1:] if part in StreamOptions.model_fields]
    return ".".join([field, *inner]), message[:1].lower() + message[1:]


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) <= 9):
            raise InvalidArgument("logit_bias", f"{name[:40]!r} is no token id")
        bias[int(name)] = value
    return bias
