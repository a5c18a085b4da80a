"""The field tables of `/v1/responses` and `/v1/messages` are complete and match the bodies."""

from functools import partial
from typing import Any

import pytest
from openai.types.responses import response_create_params

from gateway.faces.http.dialect.fields import FieldRule, Handling
from gateway.faces.http.dialect.messages_fields import MESSAGES_FIELDS
from gateway.faces.http.dialect.responses_fields import RESPONSES_FIELDS
from gateway.faces.http.messages.body import MessagesBody, read_messages_body
from gateway.faces.http.responses.body import ResponsesBody, read_responses_body
from gateway.faces.http.schema import Body
from services.runtime.errors import InvalidArgument

# Fields of anthropic 2.14's `messages.create`, of its beta, too.
ANTHROPIC = """max_tokens messages model cache_control container diagnostics inference_geo metadata
output_config service_tier speed stop_sequences system thinking tool_choice tools stream
billing_policy compaction context_management fallback_credit_token fallbacks mcp_servers thread
betas user_profile_id workspace_id output_format temperature top_p top_k"""

RESPONSE: dict[str, Any] = {"input": "hi"}
MESSAGE: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
APIS: list[tuple[type[Body], Any, dict[str, Any]]] = [
    (ResponsesBody, partial(read_responses_body, lambda _: None), RESPONSE),
    (MessagesBody, partial(read_messages_body, MessagesBody), MESSAGE),
]


@pytest.mark.parametrize(
    ("fields", "defined"),
    [
        (RESPONSES_FIELDS, {*response_create_params.ResponseCreateParamsBase.__annotations__}),
        (MESSAGES_FIELDS, {*ANTHROPIC.split()}),
    ],
    ids=["openai", "anthropic"],
)
def test_every_defined_field_has_a_rule_and_a_short_note(
    fields: dict[str, FieldRule], defined: set[str]
) -> None:
    assert defined - fields.keys() == set()
    assert all(0 < len(rule.note) < 80 for rule in fields.values())


@pytest.mark.parametrize(("kind", "read", "body"), APIS, ids=["responses", "messages"])
def test_fields_are_handled_as_their_rules_say(
    kind: type[Body], read: Any, body: dict[str, Any]
) -> None:
    supported = {n for n, rule in kind.fields.items() if rule.handling is Handling.SUPPORTED}
    assert supported <= kind.model_fields.keys()
    ignored = [n for n, rule in kind.fields.items() if rule.handling is Handling.IGNORED]
    values: tuple[object, ...] = ("x", 7, [{}], {"x": [1]}, True, None)
    for value in values:
        given = read({**body, **dict.fromkeys(ignored, value)})
        assert (given, given.unknown) == (read(body), [])
    for name, rule in kind.fields.items():
        if rule.handling is Handling.REFUSED:
            read({**body, name: []})
            with pytest.raises(InvalidArgument) as caught:
                read({**body, name: {"x": 1}})
            assert caught.value.field == name
    assert read({**body, "temprature": 1}).unknown == ["temprature"]
