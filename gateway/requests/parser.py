"""From a GenerateRequest to a `Generation`: everything checked and resolved, or one named fault."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from google.protobuf.message import Message

from gateway.config import GatewayConfig
from gateway.requests import sla as slas
from gateway.requests.sampling import RANGES, Sampling, fault_of, fault_of_stops
from gateway.requests.text import TemplateError, Text
from protos import common_pb2, gateway_pb2
from services.core import Sla
from services.runtime.errors import Code, InvalidArgument, ServiceError

ROLES = ("system", "user", "assistant")
MAX_NAME_CHARS = 256  # of an application's name, a cache salt and a user
MAX_ANSWERS = 32  # earlier answers told to the predictor; the last ones say most


class UnknownModel(ServiceError):
    """A model that is not served here."""

    def __init__(self, name: str, known: str):
        super().__init__(Code.NOT_FOUND, f"model: {name!r} is not served here; known: {known}")


@dataclass(frozen=True, slots=True)
class Reach:
    """The longest prompt + answer there is room for, and what sets that bound."""

    tokens: int
    bound: str


@dataclass(frozen=True, slots=True)
class Generation:
    """One prompt to answer, in every respect decided."""

    model: str
    prompt_ids: Sequence[int] = field(repr=False)
    sampling: Sampling
    sla: Sla
    arrival_s: float
    deadline_s: float = inf
    application: str = ""
    instruction: str = field(default="", repr=False)
    user_input: str = field(default="", repr=False)
    answer_tokens: tuple[int, ...] = ()  # of the conversation's earlier answers, about
    cache_salt: str = field(default="", repr=False)  # whose cached prefixes it may share
    user: str = field(default="", repr=False)  # whose it is, as its client says

    @property
    def tenant(self) -> str:
        """Whose share it counts to: a salt keeps tenants apart already, a user is but named."""
        return self.cache_salt or self.user

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Clock:
    """When a request came, and how long it may take."""

    arrival_s: float
    timeout_s: float = inf


class Parser:
    """Checks requests against one model's text, the config's bounds and the fleet's reach."""

    def __init__(
        self,
        config: GatewayConfig,
        text: Text,
        draw_seed: Callable[[], int],
        defaults: Mapping[str, float] | None = None,
    ):
        """`defaults` stand for sampling fields that a request leaves out."""
        self._config = config
        self._defaults = defaults or {}
        self._text = text
        self._draw_seed = draw_seed
        self._slas: Mapping[str, Sla] = {k: v.named(k) for k, v in config.sla_classes.items()}

    def parse(self, request: gateway_pb2.GenerateRequest, reach: Reach, clock: Clock) -> Generation:
        """Raises InvalidArgument naming the field, or UnknownModel."""
        self.check_model(request.model)
        _check_names(request)
        sla = self._parse_sla(request.sla)
        _check_sampling(request.sampling, self._config)
        prompt_ids = self._prompt_ids(request)
        instruction, user_input = _prompt_text(request, self._config.max_text_bytes)
        return Generation(
            self._config.model_name,
            prompt_ids,
            self._resolve(request.sampling, len(prompt_ids), reach),
            sla,
            clock.arrival_s,
            clock.arrival_s + clock.timeout_s,
            request.application,
            instruction,
            user_input,
            _answer_tokens(request.chat, len(prompt_ids)),
            request.cache_salt,
            request.user,
        )

    def check_model(self, name: str) -> None:
        """Raises UnknownModel unless `name` is empty or the served model."""
        if name and name != self._config.model_name:
            raise UnknownModel(name[:MAX_NAME_CHARS], self._config.model_name)

    def _parse_sla(self, message: common_pb2.Sla) -> Sla:
        budgets = _given(message, slas.BUDGETS)
        try:
            return slas.resolve(self._slas, self._config.default_sla, message.name, budgets)
        except slas.SlaError as error:
            raise InvalidArgument("sla", str(error)) from None

    def _prompt_ids(self, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidArgument("prompt", "missing; give prompt, prompt_tokens or chat")
        ids = {"prompt": self._raw, "prompt_tokens": self._tokens, "chat": self._chat}[kind](
            request
        )
        if not ids:
            raise InvalidArgument("prompt", "must not be empty")
        return ids

    def _raw(self, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
        return self._text.encode(request.prompt) if request.prompt else ()

    def _tokens(self, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
        ids = list(request.prompt_tokens.ids)
        wrong = next((i for i in ids if i >= self._text.vocabulary_tokens), None)
        if wrong is not None:
            size = self._text.vocabulary_tokens
            raise InvalidArgument("prompt", f"token id {wrong} is outside the vocabulary of {size}")
        return ids

    def _chat(self, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
        messages = [{"role": m.role, "content": m.content} for m in request.chat.messages]
        if not messages:
            raise InvalidArgument("messages", "must not be empty")
        for at, message in enumerate(messages):
            if message["role"] not in ROLES:
                known = ", ".join(ROLES)
                raise InvalidArgument(
                    f"messages[{at}].role", f"unknown role {message['role']!r}; known: {known}"
                )
        if not any(message["content"] for message in messages):
            raise InvalidArgument("messages", "must not all be empty")
        try:
            return self._text.encode_chat(messages)
        except TemplateError as error:
            raise InvalidArgument("messages", str(error)) from None

    def _resolve(self, given: common_pb2.Sampling, prompt_tokens: int, reach: Reach) -> Sampling:
        room = reach.tokens - prompt_tokens
        wanted = given.max_tokens if given.HasField("max_tokens") else max(1, room)
        if wanted > room:
            raise InvalidArgument(
                "max_tokens" if room > 0 else "prompt",
                f"{prompt_tokens} prompt tokens + {wanted} max_tokens = {prompt_tokens + wanted}, "
                f"over the {reach.tokens} tokens that {reach.bound} can hold",
            )
        fields = {**self._defaults, **_given(given, (*RANGES, "ignore_eos"))}
        seed = given.seed if given.HasField("seed") else self._draw_seed()
        fields |= {"seed": seed, "max_tokens": wanted, "stop": tuple(given.stop)}
        fields["top_k"] = max(0, int(fields.get("top_k", 0)))  # -1 is vLLM's word for off
        resolved = Sampling(**fields)
        if resolved.min_tokens > wanted:
            raise InvalidArgument(
                "min_tokens", f"{resolved.min_tokens} is over max_tokens, {wanted}"
            )
        return resolved


def check_timeout(field_name: str, timeout_s: float) -> float:
    """A timeout a client asked for; raises InvalidArgument unless positive and finite."""
    if not (isfinite(timeout_s) and timeout_s > 0):
        fault = f"must be a positive number of seconds, not {timeout_s:g}"
        raise InvalidArgument(field_name, fault)
    return timeout_s


def _check_names(request: gateway_pb2.GenerateRequest) -> None:
    for name in ("application", "cache_salt", "user"):
        if len(getattr(request, name)) > MAX_NAME_CHARS:
            raise InvalidArgument(name, f"at most {MAX_NAME_CHARS} characters")


def _check_sampling(given: common_pb2.Sampling, config: GatewayConfig) -> None:
    for name, value in _given(given, RANGES).items():
        if fault := fault_of(name, value):
            raise InvalidArgument(name, fault)
    if given.n > config.max_choices:
        raise InvalidArgument("n", f"at most {config.max_choices} choices, not {given.n}")
    if fault := fault_of_stops(given.stop, config.max_stop_chars):
        raise InvalidArgument("stop", fault)


def _given(message: Message, fields: Iterable[str]) -> dict[str, Any]:
    """Those of a message's optional fields that are set."""
    return {name: getattr(message, name) for name in fields if message.HasField(name)}


def _prompt_text(request: gateway_pb2.GenerateRequest, max_bytes: int) -> tuple[str, str]:
    """What a content predictor reads: the system prompt, and the last user turn or the prompt."""
    messages = request.chat.messages
    system = next((m.content for m in messages if m.role == "system"), "")
    user = next((m.content for m in reversed(messages) if m.role == "user"), request.prompt)
    return _cut(system, max_bytes), _cut(user, max_bytes)


def _answer_tokens(chat: gateway_pb2.Chat, prompt_tokens: int) -> tuple[int, ...]:
    """Tokens of the assistant's earlier answers, by their share of the prompt's characters: exact
    counts would cost a second tokenization, and a forecast needs none."""
    chars = sum(len(message.content) for message in chat.messages)
    answers = [len(m.content) for m in chat.messages if m.role == "assistant"]
    return tuple(round(answer * prompt_tokens / chars) for answer in answers[-MAX_ANSWERS:])


def _cut(text: str, max_bytes: int) -> str:
    if len(text) * 4 <= max_bytes:
        return text
    return text[:max_bytes].encode()[:max_bytes].decode(errors="ignore")
