"""The bodies of Anthropic's endpoints, and their conversion to ClientRequests."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, TypeVar

from pydantic import Field

from gateway.faces.http.dialect.constraints import read_schema
from gateway.faces.http.dialect.content import decode_messages
from gateway.faces.http.dialect.fields import FieldRule
from gateway.faces.http.dialect.messages_fields import MESSAGES_FIELDS
from gateway.faces.http.messages.content import decode_conversation
from gateway.faces.http.messages.tools import read_message_tools
from gateway.faces.http.schema import Body, Int32, Json, read_body, read_budget
from gateway.requests.prompts import check_template_size
from gateway.types.client_request import ClientRequest, Conversation
from gateway.types.constraint import Constraint
from services.runtime.errors import InvalidArgument

THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
EFFORTS = ("low", "medium", "high", "xhigh", "max")


class CountBody(Body):
    """`POST /v1/messages/count_tokens`: a conversation."""

    fields: ClassVar[Mapping[str, FieldRule]] = MESSAGES_FIELDS

    messages: list[object] = Field(default_factory=list)
    system: object = None
    stop_sequences: list[str] = Field(default_factory=list)
    metadata: dict[str, object] | None = None
    thinking: dict[str, object] | None = None
    output_config: dict[str, object] | None = None
    output_format: dict[str, object] | None = None
    tools: object = None
    tool_choice: object = None
    chat_template_kwargs: dict[str, object] | None = None
    thinking_token_budget: Int32 | None = None

    def client_requests(self) -> list[ClientRequest]:
        """A list of one. If the assistant has the last word, the answer continues it."""
        entries = decode_conversation(self.system, self.messages)
        continued = bool(entries) and entries[-1]["role"] == "assistant"
        tools, use = read_message_tools(self.tools, self.tool_choice)
        conversation = Conversation(
            decode_messages(entries),
            self._template_kwargs(),
            add_generation_prompt=not continued,
            continue_final_message=continued,
            tools=() if use is None else tools,
        )
        self.stop = self.stop_sequences
        request = self._client_request(conversation, self._sampling(None, self.max_tokens))
        return [
            replace(
                request,
                tools=use,
                separates_reasoning=True,
                reasoning_tokens=self._read_budget(),
                limits_known_reasoning=self.thinking_token_budget is None,
            )
        ]

    def _read_budget(self) -> int | None:
        """The most tokens of reasoning: of foretoken's field, else of Anthropic's."""
        if self.thinking_token_budget is not None:
            return read_budget(self.thinking_token_budget)
        tokens = (self.thinking or {}).get("budget_tokens")
        if tokens is not None and (type(tokens) is not int or not 1 <= tokens < 2**31):
            raise InvalidArgument("thinking.budget_tokens", f"must be at least 1, not {tokens!r}")
        return tokens

    def _template_kwargs(self) -> Mapping[str, object]:
        given = {**self._thinking(), **(self.chat_template_kwargs or {})}
        if given:
            check_template_size(json.dumps(given))
        return given

    def _thinking(self) -> Mapping[str, object]:
        found: dict[str, object] = {}
        if self.thinking is not None:
            kind = self.thinking.get("type")
            if not isinstance(kind, str) or kind not in THINKING:
                known = ", ".join(THINKING)
                raise InvalidArgument("thinking.type", f"must be one of {known}, not {kind!r}")
            found["enable_thinking"] = THINKING[kind]
        effort = (self.output_config or {}).get("effort")
        if effort is not None:
            if effort not in EFFORTS:
                known = ", ".join(EFFORTS)
                raise InvalidArgument("output_config.effort", f"must be one of {known}")
            found["reasoning_effort"] = effort
        return found


class MessagesBody(CountBody):
    """`POST /v1/messages`."""

    def client_requests(self) -> list[ClientRequest]:
        if self.max_tokens is None:
            raise InvalidArgument("max_tokens", "is missing")
        return super().client_requests()


BodyT = TypeVar("BodyT", bound=CountBody)


def read_messages_body(kind: type[BodyT], fields: Json) -> BodyT:
    """Raises InvalidArgument naming the first wrong or refused field."""
    body = read_body(kind, fields)
    user = (body.metadata or {}).get("user_id")
    if user is not None:
        if not isinstance(user, str):
            raise InvalidArgument("metadata.user_id", "must be a string")
        body.user = user
    body.constrain(_read_format(body))
    return body


def _read_format(body: CountBody) -> Constraint | None:
    inner = (body.output_config or {}).get("format")
    name = "output_format" if inner is None else "output_config.format"
    given = body.output_format if inner is None else inner
    if given is None:
        return None
    if not isinstance(given, dict):
        raise InvalidArgument(name, "must be an object")
    if given.get("type") != "json_schema":
        raise InvalidArgument(f"{name}.type", f"must be 'json_schema', not {given.get('type')!r}")
    if given.get("schema") is None:
        raise InvalidArgument(f"{name}.schema", "is missing")
    return read_schema(f"{name}.schema", given["schema"])
