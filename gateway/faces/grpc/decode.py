"""gRPC messages as ClientRequests."""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from gateway.requests.prompts import parse_template_kwargs
from gateway.requests.sampling import RANGES, SWITCHES
from gateway.types.client_request import (
    ClientRequest,
    Conversation,
    Prompt,
    SamplingFields,
    given_fields,
)
from gateway.types.constraint import Constraint, ConstraintKind
from gateway.types.sla_classes import BUDGETS, OTHER
from protos.generated import common_pb2, gateway_pb2

OPTIONAL_FIELDS = (*RANGES, *SWITCHES, "seed")
REPEATED_FIELDS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")


def decode_request(message: gateway_pb2.GenerateRequest) -> ClientRequest:
    """Raises InvalidArgument for template arguments that are not a JSON object."""
    return ClientRequest(
        _decode_prompt(message),
        _decode_sampling(message.sampling),
        model=message.model,
        sla_class=message.sla.name,
        sla_budgets=_select_set(message.sla, BUDGETS),
        application=message.application,
        cache_salt=message.cache_salt,
        user=message.user,
        include_forecast=message.include_forecast,
        priority=message.priority,
        request_id=message.request_id,
        constraint=_decode_constraint(message.sampling),
        **_select_set(message, ("add_special_tokens", "truncate_prompt_tokens")),
    )


def read_sla_class(message: common_pb2.Sla) -> str:
    """The class that the request counts towards, before it is checked; empty: the default."""
    return OTHER if _select_set(message, BUDGETS) else message.name


def _decode_prompt(message: gateway_pb2.GenerateRequest) -> Prompt:
    match message.WhichOneof("input"):
        case "prompt":
            return message.prompt
        case "prompt_tokens":
            return list(message.prompt_tokens.ids)
        case "chat":
            chat = message.chat
            return Conversation(
                [{"role": each.role, "content": each.content} for each in chat.messages],
                parse_template_kwargs(chat.template_kwargs_json),
                chat.add_generation_prompt if chat.HasField("add_generation_prompt") else None,
                chat.continue_final_message,
            )
        case _:
            return None


def _decode_sampling(message: common_pb2.Sampling) -> SamplingFields:
    given = _select_set(message, OPTIONAL_FIELDS)
    for name in REPEATED_FIELDS:
        if values := getattr(message, name):
            given[name] = list(values)
    if message.logit_bias:
        given["logit_bias"] = dict(message.logit_bias)
    return given_fields(given)


def _decode_constraint(message: common_pb2.Sampling) -> Constraint | None:
    if not message.grammar:
        return None
    return Constraint(ConstraintKind.GRAMMAR, message.grammar, field_name="sampling.grammar")


def _select_set(message: Message, fields: Iterable[str]) -> dict[str, Any]:
    """The optional fields of a message that are set."""
    return {name: getattr(message, name) for name in fields if message.HasField(name)}
