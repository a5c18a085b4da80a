"""The OpenAI request bodies, and their conversion to ClientRequests.

`gateway.faces.http.dialect.fields` lists all fields. Types are checked here, strictly. Ranges are
checked in `gateway.requests`, for HTTP and gRPC alike. A null field counts as absent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError

from gateway.faces.http.dialect.constraints import read_constraint
from gateway.faces.http.dialect.content import decode_messages, find_unknown_fields, split_prompts
from gateway.faces.http.dialect.fields import (
    ALIASES,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    NOT_SUPPORTED,
    FieldRule,
    Handling,
)
from gateway.faces.http.dialect.tools import read_tool_use, read_tools
from gateway.requests.prompts import check_template_size
from gateway.types.client_request import (
    ClientRequest,
    Conversation,
    Prompt,
    SamplingFields,
    given_fields,
    text_of,
)
from gateway.types.constraint import Constraint
from services.runtime.errors import InvalidArgument

Json = Mapping[str, object]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Field(ge=0, lt=2**32)]

SAMPLING_FIELDS = tuple(SamplingFields.__annotations__)
DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as at OpenAI; a chat may use the remaining context
NO_LIMIT = -1  # of reasoning
MAX_TOKEN_DIGITS = 9  # of a token id in logit_bias


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    continuous_usage_stats: bool = False  # with include_usage: counts of the choice in each chunk
    include_forecast: bool = False
    include_obfuscation: bool = False  # accepted without effect


NO_OPTIONS = StreamOptions()
OPTIONS = StreamOptions.model_fields.keys()


class Body(BaseModel):
    """Fields of both endpoints."""

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
    cache_salt: str = ""
    user: str = ""
    priority: Int32 = 0
    request_id: str = ""
    echo: bool = False
    # Constraints of the answer: `dialect.constraints` checks them.
    response_format: object = None
    structured_outputs: object = None
    guided_json: object = None
    guided_regex: object = None
    guided_choice: object = None
    guided_grammar: object = None
    json_schema: object = None
    regex: object = None
    ebnf: object = None

    _unknown: list[str] = PrivateAttr(default_factory=list)
    _constraint: Constraint | None = PrivateAttr(default=None)

    @property
    def unknown(self) -> Sequence[str]:
        """Names of unknown fields in the body."""
        return self._unknown

    @property
    def recalled_bytes(self) -> int:
        """Bytes of the prompt that are not in the body."""
        return 0

    @property
    def constraint(self) -> Constraint | None:
        """What each answer must follow."""
        return self._constraint

    def constrain(self, constraint: Constraint | None) -> None:
        """Adds a constraint that a field of this endpoint gives. Raises InvalidArgument for a
        second one."""
        if constraint is None:
            return
        if self._constraint is not None:
            name = self._constraint.field_name
            sentence = f"{name} constrains the answer, too; remove one of them"
            raise InvalidArgument(constraint.field_name, sentence)
        self._constraint = constraint

    @property
    def prompt_top_n(self) -> int | None:
        """Number of alternatives scored for each prompt token; None: prompt tokens get no score."""
        return self.prompt_logprobs

    def _sampling(self, logprobs: int | None, max_tokens: int | None) -> SamplingFields:
        """The given sampling parameters."""
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise InvalidArgument("allowed_token_ids", "must not be empty")
        given = {name: getattr(self, name, None) for name in SAMPLING_FIELDS}
        given |= {
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": self.prompt_top_n,
            "stop": [self.stop] if isinstance(self.stop, str) else self.stop,
            "logit_bias": _decode_bias(self.logit_bias) if self.logit_bias else None,
        }
        return given_fields(given)

    def _client_request(self, prompt: Prompt, sampling: SamplingFields) -> ClientRequest:
        """What does not depend on the endpoint."""
        return ClientRequest(
            prompt,
            sampling,
            model=self.model,
            cache_salt=self.cache_salt,
            user=self.user,
            include_forecast=self.stream_options.include_forecast,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority,
            request_id=self.request_id,
            constraint=self.constraint,
        )


class CompletionBody(Body):
    """`POST /v1/completions`."""

    fields: ClassVar[Mapping[str, FieldRule]] = COMPLETION_FIELDS

    prompt: object = None
    logprobs: Int32 | None = None

    @property
    def prompt_top_n(self) -> int | None:
        echoed = self.logprobs if self.echo else None
        if self.echo and self.max_tokens == 0 and echoed is None:
            echoed = 0
        given = [top_n for top_n in (self.prompt_logprobs, echoed) if top_n is not None]
        return max(given, default=None)

    def client_requests(self) -> list[ClientRequest]:
        """One for each prompt, with the same sampling."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self._sampling(self.logprobs, limit)
        return [self._client_request(prompt, sampling) for prompt in split_prompts(self.prompt)]

    def prompt_texts(self) -> Sequence[str | None]:
        """Each prompt that is a text and not truncated; None for others."""
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
    tools: object = None  # `dialect.tools` checks them
    tool_choice: object = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    thinking_token_budget: Int32 | None = None
    separate_reasoning: bool = True

    def client_requests(self) -> list[ClientRequest]:
        """A list of one."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        limit, alias = self.max_tokens, self.max_completion_tokens
        if limit is not None and alias is not None and limit != alias:
            raise InvalidArgument("max_tokens", "differs from max_completion_tokens")
        tools = read_tools(self.tools)
        use = read_tool_use(tools, self.tool_choice, self.parallel_tool_calls)
        conversation = Conversation(
            decode_messages(self.messages),
            self._template_kwargs(),
            self.add_generation_prompt,
            self.continue_final_message,
            () if use is None else tools,
        )
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        sampling = self._sampling(logprobs, alias if limit is None else limit)
        request = self._client_request(conversation, sampling)
        budget = self.thinking_token_budget
        if budget is not None and not self.separate_reasoning:
            raise InvalidArgument("thinking_token_budget", "needs separate_reasoning")
        return [
            replace(
                request,
                tools=use,
                separates_reasoning=self.separate_reasoning,
                reasoning_tokens=read_budget(budget),
            )
        ]

    def last_assistant_content(self) -> str:
        """The text of the last message if its role is assistant."""
        last = decode_messages(self.messages)[-1]
        return text_of(last) if last["role"] == "assistant" else ""

    def _template_kwargs(self) -> Mapping[str, object]:
        """Template arguments, with the reasoning effort under both names that templates use.
        Explicit arguments take precedence."""
        given, effort = self.chat_template_kwargs or {}, self.reasoning_effort
        if isinstance(effort, str | int | float):
            thinks = effort != "none"
            given = {"reasoning_effort": effort, "enable_thinking": thinks, **given}
        if given:
            check_template_size(json.dumps(given))
        return given


BodyT = TypeVar("BodyT", bound=Body)
ModelT = TypeVar("ModelT", bound=BaseModel)


def read_body(kind: type[BodyT], fields: Json) -> BodyT:
    """Raises InvalidArgument naming the first wrong or refused field. O(given fields)."""
    given, unknown = _select_fields(kind.fields, fields)
    unknown += find_unknown_fields(given.get("messages"))
    options = given.get("stream_options")
    if isinstance(options, dict):
        known = {k: v for k, v in options.items() if k in OPTIONS and v is not None}
        unknown += [f"stream_options.{name}" for name in sorted(options.keys() - OPTIONS)]
        given["stream_options"] = known
    body = validate_model(kind, given)
    if given.get("stream_options") and not body.stream:
        raise InvalidArgument("stream_options", "is only allowed when stream is true")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidArgument("prompt_logprobs", "is not available with stream; use echo")
    body._unknown = unknown
    body._constraint = read_constraint(given)
    return body


def validate_model(kind: type[ModelT], given: Json) -> ModelT:
    """Raises InvalidArgument naming the first wrong field."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidArgument(*_explain(first["loc"], first["msg"])) from None


def _select_fields(
    rules: Mapping[str, FieldRule], fields: Json
) -> tuple[dict[str, object], list[str]]:
    """The supported fields, under their own names, and the names of unknown fields."""
    given: dict[str, object] = {}
    unknown: list[str] = []
    for name, value in fields.items():
        rule = rules.get(name)
        if value is None:
            continue
        if rule is None:
            unknown.append(name)
        elif name in ALIASES:
            given.setdefault(ALIASES[name], value)
        elif rule.handling is Handling.SUPPORTED:
            given[name] = value
        elif rule.handling is Handling.REFUSED and _changes_answer(rule, name, fields):
            raise InvalidArgument(name, NOT_SUPPORTED)
    return given, unknown


def _changes_answer(rule: FieldRule, name: str, fields: Json) -> bool:
    """`best_of` changes nothing if it equals `n`: then every generated choice is returned."""
    if name == "best_of" and fields[name] == fields.get("n"):
        return False
    return rule.changes_answer(fields[name])


def _explain(loc: tuple[int | str, ...], message: str) -> tuple[str, str]:
    field = str(loc[0]) if loc else ""
    inner = [str(part) for part in loc[1:] if part in StreamOptions.model_fields]
    return ".".join([field, *inner]), message[:1].lower() + message[1:]


def read_budget(tokens: int | None) -> int | None:
    """The most tokens of reasoning; None: no limit."""
    return None if tokens == NO_LIMIT else tokens


def _decode_bias(given: Mapping[str, float]) -> dict[int, float]:
    bias: dict[int, float] = {}
    for name, value in given.items():
        if not (name.isascii() and name.isdigit() and len(name) <= MAX_TOKEN_DIGITS):
            raise InvalidArgument("logit_bias", f"{name[:40]!r} is not a token id")
        bias[int(name)] = value
    return bias
