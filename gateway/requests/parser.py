"""From a GenerateRequest to a `Generation`: everything checked and resolved, or one named fault."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

from google.protobuf.message import Message

from gateway.config import GatewayConfig
from gateway.requests import prompts
from gateway.requests import sla as slas
from gateway.requests.errors import ContextOverflow, UnknownModel
from gateway.requests.sampling import (
    MAX_STOP_TOKENS,
    RANGES,
    SWITCHES,
    Sampling,
    fault_of,
    fault_of_bad_words,
    fault_of_bias,
    fault_of_ids,
    fault_of_stops,
)
from gateway.requests.text import Text
from protos.generated import common_pb2, gateway_pb2
from services.core import Sla
from services.runtime.errors import InvalidArgument

MAX_NAME_CHARS = 256  # of an application's name, a cache salt and a user
MAX_ID_CHARS = 128  # of an id that a client gives its request
# Fields that name single tokens, or words: what is wrong with them, given the vocabulary's size.
STEERING: Mapping[str, Callable[[Any, int], str | None]] = {
    "stop_token_ids": lambda ids, size: fault_of_ids(ids, size, MAX_STOP_TOKENS),
    "allowed_token_ids": lambda ids, size: fault_of_ids(ids, size, size),
    "logit_bias": fault_of_bias,
    "bad_words": lambda words, _: fault_of_bad_words(words),
}
MAX_ANSWERS = 32  # earlier answers told to the predictor; the last ones say most


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
    include_forecast: bool = False  # its client is told what is foreseen of each choice
    priority: int = 0  # lower goes before higher
    request_id: str = ""  # as its client calls it; empty: not at all
    scores_only: bool = False  # the one token of its answer is drawn for nobody
    traceparent: str = ""  # what it is traced under; empty: nobody records it

    @property
    def tenant(self) -> str:
        """Whose share it counts to: a salt keeps tenants apart already, a user is but named."""
        return self.cache_salt or self.user

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)


@dataclass(frozen=True, slots=True)
class Clock:
    """When a request came, how long it may take, and what of its SLA was read at the door."""

    arrival_s: float
    timeout_s: float = inf
    sla_class: str = ""  # as its client has it; empty: the default


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
        self._slas = config.slas

    def parse(self, request: gateway_pb2.GenerateRequest, reach: Reach, clock: Clock) -> Generation:
        """Raises InvalidArgument naming the field, or UnknownModel."""
        self.check_model(request.model)
        _check_names(request)
        sla = self._parse_sla(request.sla)
        scores_only = _scores_only(request.sampling)
        self._check_sampling(request.sampling, scores_only)
        prompt_ids = self.prompt_ids(request)
        wanted = 1 if scores_only else _wanted(request.sampling)
        if request.HasField("truncate_prompt_tokens"):
            room = reach.tokens - (wanted or 1)
            prompt_ids = prompts.cut(prompt_ids, request.truncate_prompt_tokens, room)
        sampling = self._resolve(request.sampling, wanted, len(prompt_ids), reach)
        instruction, user_input = _prompt_text(request, self._config.max_text_bytes)
        return Generation(
            self._config.model_name,
            prompt_ids,
            sampling,
            sla,
            clock.arrival_s,
            clock.arrival_s + clock.timeout_s,
            request.application,
            instruction,
            user_input,
            _answer_tokens(request.chat, len(prompt_ids)),
            request.cache_salt,
            request.user,
            request.include_forecast,
            request.priority,
            request.request_id,
            scores_only,
        )

    def prompt_ids(self, request: gateway_pb2.GenerateRequest) -> Sequence[int]:
        """Of a prompt or conversation, however many. Raises InvalidArgument naming the field."""
        return prompts.prompt_ids(self._text, request)

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

    def _check_sampling(self, given: common_pb2.Sampling, scores_only: bool) -> None:
        size = self._text.vocabulary_tokens
        for name, value in _given(given, RANGES).items():
            if (fault := fault_of(name, value)) and not (scores_only and name == "max_tokens"):
                raise InvalidArgument(name, fault)
        if given.n > self._config.max_choices:
            most = self._config.max_choices
            raise InvalidArgument("n", f"at most {most} choices, not {given.n}")
        stops = fault_of_stops(given.stop, self._config.max_stop_chars)
        if stops:
            raise InvalidArgument("stop", stops)
        for name, check in STEERING.items():
            listed = getattr(given, name)
            if listed and (fault := check(listed, size)):
                raise InvalidArgument(name, fault)

    def _resolve(
        self, given: common_pb2.Sampling, asked: int | None, prompt_tokens: int, reach: Reach
    ) -> Sampling:
        room = reach.tokens - prompt_tokens
        wanted = max(1, room) if asked is None else asked
        if wanted > room:
            raise ContextOverflow.counted(prompt_tokens, wanted, reach.tokens, reach.bound)
        fields = {**self._defaults, **_given(given, RANGES), **_given(given, SWITCHES)}
        seed = given.seed if given.HasField("seed") else self._draw_seed()
        fields |= {"seed": seed, "max_tokens": wanted, "stop": tuple(given.stop)}
        fields["top_k"] = max(0, int(fields.get("top_k", 0)))  # -1 is vLLM's word for off
        fields |= self._steered(given)
        resolved = Sampling(**fields)
        if resolved.min_tokens > wanted:
            raise InvalidArgument(
                "min_tokens", f"{resolved.min_tokens} is over max_tokens, {wanted}"
            )
        return resolved

    def _steered(self, given: common_pb2.Sampling) -> dict[str, Any]:
        """What names single tokens, of those that few requests name."""
        fields: dict[str, Any] = {}
        if given.stop_token_ids:
            fields["stop_token_ids"] = frozenset(given.stop_token_ids)
        if given.logit_bias:
            fields["logit_bias"] = dict(given.logit_bias)
        if given.allowed_token_ids:
            fields["allowed_token_ids"] = tuple(dict.fromkeys(given.allowed_token_ids))
        if given.bad_words:
            words = dict.fromkeys(given.bad_words)
            fields["bad_tokens"] = [ids for w in words for ids in self._text.sequences_of(w)]
        return fields


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
    name = request.request_id
    if len(name) > MAX_ID_CHARS or not name.isprintable() or " " in name:
        raise InvalidArgument("request_id", f"at most {MAX_ID_CHARS} printable characters")


def _scores_only(given: common_pb2.Sampling) -> bool:
    """Whether it wants its prompt scored and no answer."""
    none = given.HasField("max_tokens") and given.max_tokens == 0
    return none and given.HasField("prompt_logprobs")


def _wanted(given: common_pb2.Sampling) -> int | None:
    return given.max_tokens if given.HasField("max_tokens") else None


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
