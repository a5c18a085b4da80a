"""Checks a ClientRequest and resolves it to a GenerationRequest, or names the faulty field."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gateway.config import GatewayConfig
from gateway.requests.prompts import count_kept_tokens, tokenize_prompt
from gateway.requests.sampling import (
    MAX_STOP_TOKENS,
    RANGES,
    SWITCHES,
    find_bad_word_fault,
    find_bias_fault,
    find_id_fault,
    find_range_fault,
    find_stop_fault,
)
from gateway.requests.text import Text
from gateway.types import sla_classes as slas
from gateway.types.client_request import ClientRequest, Conversation, text_of
from gateway.types.errors import ContextOverflow
from gateway.types.generation import ContextLimit, GenerationRequest, RequestArrival, Sampling
from services.core import Sla
from services.runtime.errors import InvalidArgument

MAX_NAME_CHARS = 256  # of an application, a cache salt and a user
MAX_ID_CHARS = 128  # of a request id
MAX_ANSWERS = 32  # earlier answers given to the predictor; the last ones tell most
MAX_UTF8_BYTES = 4  # of a character
# Fields that name tokens or words: the fault of a value, given the vocabulary size.
TOKEN_FIELDS: Mapping[str, Callable[[Any, int], str | None]] = {
    "stop_token_ids": lambda ids, size: find_id_fault(ids, size, MAX_STOP_TOKENS),
    "allowed_token_ids": lambda ids, size: find_id_fault(ids, size, size),
    "logit_bias": find_bias_fault,
    "bad_words": lambda words, _: find_bad_word_fault(words),
}


class Parser:
    """Checks requests against a model's tokenizer, the config's limits and the fleet's limit."""

    def __init__(
        self,
        config: GatewayConfig,
        text: Text,
        draw_seed: Callable[[], int],
        defaults: Mapping[str, float] | None = None,
    ):
        """`defaults` replace sampling fields that a request leaves out."""
        self._config = config
        self._defaults = defaults or {}
        self._text = text
        self._draw_seed = draw_seed
        self._slas = config.slas

    def parse(
        self, request: ClientRequest, limit: ContextLimit, arrival: RequestArrival
    ) -> GenerationRequest:
        """Raises InvalidArgument naming the field. Safe in any thread. The request's model is
        this one or an adapter of it: what reads it has selected the parser by it."""
        _check_names(request)
        sla = self._resolve_sla(request)
        self._check_sampling(request)
        wanted = 1 if request.scores_only else request.sampling.get("max_tokens")
        kept = count_kept_tokens(request.truncate_prompt_tokens, limit.tokens - (wanted or 1))
        prompt_ids = tokenize_prompt(self._text, request, kept)[-kept:]
        sampling = self._resolve_sampling(request.sampling, wanted, len(prompt_ids), limit)
        instruction, user_input = _select_predictor_text(request, self._config.max_text_bytes)
        name = self._config.model_name
        adapter = "" if request.model in ("", name) else request.model
        return GenerationRequest(
            replace(request, prompt=None, model=name, adapter=adapter),
            prompt_ids,
            sampling,
            sla,
            arrival.arrival_s,
            arrival.deadline_s,
            instruction,
            user_input,
            _estimate_answer_tokens(request, len(prompt_ids)),
        )

    def _resolve_sla(self, request: ClientRequest) -> Sla:
        default = self._config.default_sla
        try:
            return slas.resolve(self._slas, default, request.sla_class, request.sla_budgets)
        except slas.SlaError as error:
            raise InvalidArgument("sla", str(error)) from None

    def _check_sampling(self, request: ClientRequest) -> None:
        given: Mapping[str, Any] = request.sampling
        size = self._text.vocabulary_tokens
        for name in (each for each in RANGES if each in given):
            ignored = request.scores_only and name == "max_tokens"
            if not ignored and (fault := find_range_fault(name, given[name])):
                raise InvalidArgument(name, fault)
        if request.choices > self._config.max_choices:
            most = self._config.max_choices
            raise InvalidArgument("n", f"at most {most} choices, not {request.choices}")
        if fault := find_stop_fault(given.get("stop", ()), self._config.max_stop_chars):
            raise InvalidArgument("stop", fault)
        for name, find_fault in TOKEN_FIELDS.items():
            listed = given.get(name)
            if listed and (fault := find_fault(listed, size)):
                raise InvalidArgument(name, fault)

    def _resolve_sampling(
        self, given: Mapping[str, Any], wanted: int | None, prompt_tokens: int, limit: ContextLimit
    ) -> Sampling:
        room = limit.tokens - prompt_tokens
        max_tokens = max(1, room) if wanted is None else wanted
        if max_tokens > room:
            raise ContextOverflow.counted(prompt_tokens, max_tokens, limit.tokens, limit.bound)
        plain = {name: given[name] for name in (*RANGES, *SWITCHES) if name in given}
        seed = given["seed"] if "seed" in given else self._draw_seed()
        fields: dict[str, Any] = {**self._defaults, **plain}
        fields |= {"seed": seed, "max_tokens": max_tokens, "stop": tuple(given.get("stop", ()))}
        fields["top_k"] = max(0, int(fields.get("top_k", 0)))  # vLLM writes -1 for off
        fields |= self._resolve_token_fields(given)
        resolved = Sampling(**fields)
        if resolved.min_tokens > max_tokens:
            fault = f"{resolved.min_tokens} is over max_tokens, {max_tokens}"
            raise InvalidArgument("min_tokens", fault)
        return resolved

    def _resolve_token_fields(self, given: Mapping[str, Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if ids := given.get("stop_token_ids"):
            fields["stop_token_ids"] = frozenset(ids)
        if bias := given.get("logit_bias"):
            fields["logit_bias"] = dict(bias)
        if ids := given.get("allowed_token_ids"):
            fields["allowed_token_ids"] = tuple(dict.fromkeys(ids))
        if words := given.get("bad_words"):
            unique = dict.fromkeys(words)
            fields["bad_tokens"] = [ids for w in unique for ids in self._text.spell_word(w)]
        return fields


def _check_names(request: ClientRequest) -> None:
    for name in ("application", "cache_salt", "user"):
        if len(getattr(request, name)) > MAX_NAME_CHARS:
            raise InvalidArgument(name, f"at most {MAX_NAME_CHARS} characters")
    request_id = request.request_id
    if len(request_id) > MAX_ID_CHARS or not request_id.isprintable() or " " in request_id:
        raise InvalidArgument("request_id", f"at most {MAX_ID_CHARS} printable characters")


def _select_predictor_text(request: ClientRequest, max_bytes: int) -> tuple[str, str]:
    """What a content predictor reads: the system prompt, and the last user message or the text."""
    match request.prompt:
        case Conversation(messages):
            system = next((text_of(m) for m in messages if m["role"] == "system"), "")
            user = next((text_of(m) for m in reversed(messages) if m["role"] == "user"), "")
            return _cut(system, max_bytes), _cut(user, max_bytes)
        case str() as text:
            return "", _cut(text, max_bytes)
        case _:
            return "", ""


def _estimate_answer_tokens(request: ClientRequest, prompt_tokens: int) -> tuple[int, ...]:
    """Approximate tokens of the assistant's earlier answers, by their share of the characters.
    Exact counts would need a second tokenization; a forecast does not need them."""
    if not isinstance(request.prompt, Conversation):
        return ()
    messages = request.prompt.messages
    chars = sum(len(text_of(message)) for message in messages)
    answers = [len(text_of(m)) for m in messages if m["role"] == "assistant"]
    return tuple(round(answer * prompt_tokens / max(1, chars)) for answer in answers[-MAX_ANSWERS:])


def _cut(text: str, max_bytes: int) -> str:
    if len(text) * MAX_UTF8_BYTES <= max_bytes:
        return text
    return text[:max_bytes].encode()[:max_bytes].decode(errors="ignore")
