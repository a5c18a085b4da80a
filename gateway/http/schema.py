"""The OpenAI request bodies: which fields there are, and how they become a GenerateRequest.

Types are checked here, strictly; ranges are checked for gRPC and HTTP alike in
`gateway.requests.parser`. A field that is null counts as absent.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos import common_pb2, gateway_pb2
from services.runtime.errors import InvalidArgument

Json = Mapping[str, object]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]

# Fields that do not change the answer; real clients send them.
IGNORED = frozenset(
    ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
     "prompt_cache_retention", "parallel_tool_calls", "prediction")
)  # fmt: skip

# Fields that would change it, with the values under which they would not.
REFUSED: Mapping[str, Sequence[object]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "moderation": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}

PROMPT_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"
ROLE_ALIASES = {"developer": "system"}
MESSAGE_IGNORED = frozenset(("name", "annotations"))


DEFAULT_MAX_TOKENS = 16  # of /v1/completions, as at OpenAI; a chat goes on as far as it can


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False  # nothing is padded here


class Body(BaseModel):
    """What both endpoints take."""

    model_config = ConfigDict(strict=True, extra="forbid")

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
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = ""  # as vLLM calls it: whose cached prefixes the prompt may share
    user: str = ""  # whose it is

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling(self, logprobs: int | None, max_tokens: int | None) -> common_pb2.Sampling:
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
        )


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: object = None
    logprobs: Int32 | None = None

    def requests(self) -> list[gateway_pb2.GenerateRequest]:
        """One a prompt, all with the same sampling."""
        limit = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        sampling = self.sampling(self.logprobs, limit)
        requests = [_prompt_request(prompt) for prompt in _split_prompts(self.prompt)]
        for request in requests:
            request.model = self.model
            request.sampling.CopyFrom(sampling)
            request.cache_salt = self.cache_salt
            request.user = self.user
        return requests


class ChatBody(Body):
    """`POST /v1/chat/completions`."""

    messages: list[object] = Field(default_factory=list)
    logprobs: bool = False
    top_logprobs: Int32 | None = None
    max_completion_tokens: Int32 | None = None

    def requests(self) -> list[gateway_pb2.GenerateRequest]:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidArgument("top_logprobs", "needs logprobs to be true")
        if None is not self.max_tokens != self.max_completion_tokens is not None:
            raise InvalidArgument("max_tokens", "differs from max_completion_tokens")
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        chat = gateway_pb2.Chat(messages=[_message(i, m) for i, m in enumerate(self.messages)])
        sampling = self.sampling((self.top_logprobs or 0) if self.logprobs else None, limit)
        return [
            gateway_pb2.GenerateRequest(
                model=self.model,
                chat=chat,
                sampling=sampling,
                cache_salt=self.cache_salt,
                user=self.user,
            )
        ]


BodyT = TypeVar("BodyT", bound=Body)


def read_body(kind: type[BodyT], fields: Json) -> BodyT:
    """Raises InvalidArgument naming the first field that is wrong, refused or unknown."""
    given = {k: v for k, v in fields.items() if v is not None and k not in IGNORED}
    for name in REFUSED.keys() & given.keys():
        if name == "best_of" and given[name] == given.get("n"):
            del given[name]
        elif given.pop(name) not in REFUSED[name]:
            raise InvalidArgument(name, "is not supported here")
    try:
        body = kind.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise InvalidArgument(*_explain(first["loc"], first["type"], first["msg"])) from None
    if body.stream_options is not None and not body.stream:
        raise InvalidArgument("stream_options", "is only allowed when stream is true")
    return body


def _explain(loc: tuple[int | str, ...], kind: str, message: str) -> tuple[str, str]:
    field = str(loc[0]) if loc else ""
    if kind == "extra_forbidden":
        return ".".join(map(str, loc)), "unknown field"
    return field, message[:1].lower() + message[1:]


def _split_prompts(prompt: object) -> Iterable[str | list[int]]:
    """Raises InvalidArgument for anything but the four kinds of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt is None:
        raise InvalidArgument("prompt", "is missing")
    if not isinstance(prompt, list):
        raise InvalidArgument("prompt", f"must be {PROMPT_KINDS}")
    if not prompt:
        raise InvalidArgument("prompt", "must not be empty")
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    lists = prompt if all(isinstance(item, list) for item in prompt) else [prompt]
    if not all(_is_token(token) for tokens in lists for token in tokens):
        raise InvalidArgument("prompt", f"must be {PROMPT_KINDS}; token ids are not negative")
    return list(lists)


def _is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**32


def _prompt_request(prompt: str | list[int]) -> gateway_pb2.GenerateRequest:
    if isinstance(prompt, str):
        return gateway_pb2.GenerateRequest(prompt=prompt)
    return gateway_pb2.GenerateRequest(prompt_tokens=gateway_pb2.TokenIds(ids=prompt))


def _message(at: int, message: object) -> gateway_pb2.ChatMessage:
    where = f"messages[{at}]"
    if not isinstance(message, dict):
        raise InvalidArgument(where, "must be an object with role and content")
    given: dict[str, Any] = {k: v for k, v in message.items() if v not in (None, [])}
    role, content = given.pop("role", None), given.pop("content", "")
    extra = sorted(given.keys() - MESSAGE_IGNORED)
    if extra:
        raise InvalidArgument(f"{where}.{extra[0]}", "is not supported here")
    if not isinstance(role, str):
        raise InvalidArgument(f"{where}.role", "must be a string")
    return gateway_pb2.ChatMessage(
        role=ROLE_ALIASES.get(role, role), content=_content_text(f"{where}.content", content)
    )


def _content_text(where: str, content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidArgument(where, "must be a string or a list of text parts")
    return "".join(_part_text(f"{where}[{at}]", part) for at, part in enumerate(content))


def _part_text(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind != "text":
        raise InvalidArgument(where, f"only parts of type 'text' are supported, not {kind!r}")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidArgument(f"{where}.text", "must be a string")
    return text
