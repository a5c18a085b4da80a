"""Events of a stream: hand-worked bytes, and templates against `json.dumps` of the whole event."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.faces.http.answers.chunks import ChunkWriter, EventTemplate
from gateway.faces.http.answers.formats import ChatFormat, CompletionFormat
from gateway.faces.http.schema import ChatBody, CompletionBody, StreamOptions
from gateway.sessions.session import ChoiceChunk
from services.core import FinishReason
from tests.gateway.gateway_fakes import demo_text
from tests.gateway.sessions.test_call import RecordingOwner

LABELS = {"model": "demo"}
TEXTS = st.lists(st.text(), min_size=2, max_size=6)  # every character but surrogates
USER = [{"role": "user", "content": "Hi"}]


def chat_writer(include_usage: bool = False, **fields: object) -> ChunkWriter:
    call = RecordingOwner().call
    body = ChatBody.model_validate({"messages": USER, **fields})
    options = StreamOptions(include_usage=include_usage)
    return ChunkWriter(ChatFormat(demo_text(), call, body), call, LABELS, options)


def completion_writer(include_usage: bool = False, **fields: object) -> ChunkWriter:
    call = RecordingOwner().call
    body = CompletionBody.model_validate({"prompt": "Hi", **fields})
    options = StreamOptions(include_usage=include_usage)
    return ChunkWriter(CompletionFormat(demo_text(), call, body), call, LABELS, options)


def chunk(index: int, text: str, reason: FinishReason | None = None) -> ChoiceChunk:
    return ChoiceChunk(index, text, (5,), (), reason)


# fmt: off
def test_chat_events_are_these_bytes():
    writer = chat_writer()
    head = (
        'data: {"id": "chatcmpl-c", "object": "chat.completion.chunk", "created": 0, '
        '"model": "demo", "choices": [{"index": 0, "delta": '
    )
    end = '"logprobs": null, "finish_reason": null}]}\n\n'
    first = f'{head}{{"role": "assistant", "content": "Gr"}}, {end}'
    assert writer.encode_chunk(chunk(0, "Gr")) == first.encode()
    for text, escaped in (('ü"\n', 'ü\\"\\n'), ("", ""), ("\x00\u2028🦊", "\\u0000\u2028🦊")):
        expected = f'{head}{{"content": "{escaped}"}}, {end}'
        assert writer.encode_chunk(chunk(0, text)) == expected.encode()
    last = f'{head}{{"content": "!"}}, {end}'.replace('null}]', '"stop"}]')
    assert writer.encode_chunk(chunk(0, "!", FinishReason.STOP)) == last.encode()


def test_completion_events_are_these_bytes():
    writer = completion_writer(include_usage=True)
    head = 'data: {"id": "cmpl-c", "object": "text_completion", "created": 0, "model": "demo", '
    end = '"logprobs": null, "finish_reason": null}], "usage": null}\n\n'
    for index, text in ((0, "a"), (1, "b"), (0, "c"), (1, "d"), (0, "")):
        expected = f'{head}"choices": [{{"index": {index}, "text": "{text}", {end}'
        assert writer.encode_chunk(chunk(index, text)) == expected.encode()
# fmt: on


@given(TEXTS, st.booleans())
def test_chat_event_equals_json_of_the_event(texts: list[str], include_usage: bool):
    writer = chat_writer(include_usage)
    for number, text in enumerate(texts):
        role = {} if number else {"role": "assistant"}
        choice = {"index": 0, "delta": {**role, "content": text}, "logprobs": None}
        event = {
            "id": "chatcmpl-c", "object": "chat.completion.chunk", "created": 0, **LABELS,
            "choices": [{**choice, "finish_reason": None}],
            **({"usage": None} if include_usage else {}),
        }  # fmt: skip
        expected = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        assert writer.encode_chunk(chunk(0, text)) == expected


@given(TEXTS, st.booleans(), st.booleans())
def test_completion_event_equals_json_of_the_event(
    texts: list[str], include_usage: bool, echo: bool
):
    writer = completion_writer(include_usage, echo=echo)
    for number, text in enumerate(texts):
        shown = f"Hi{text}" if echo and not number else text
        choice = {"index": 0, "text": shown, "logprobs": None, "finish_reason": None}
        event = {
            "id": "cmpl-c", "object": "text_completion", "created": 0, **LABELS,
            "choices": [choice], **({"usage": None} if include_usage else {}),
        }  # fmt: skip
        expected = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        assert writer.encode_chunk(chunk(0, text)) == expected


@given(st.text())
def test_template_inserts_text_as_json_writes_it(text: str):
    template = EventTemplate.of('{"a": "\ue000text\ue001", "b": "x"}'.encode())
    assert json.loads(template.encode(text)) == {"a": text, "b": "x"}


@pytest.mark.parametrize("fields", [{"return_token_ids": True}, {"logprobs": True}])
def test_events_that_differ_in_more_than_their_text_have_no_template(fields: dict[str, Any]):
    writer = chat_writer(**fields)
    for text in "abc":
        [choice] = json.loads(writer.encode_chunk(chunk(0, text))[6:])["choices"]
        assert choice["delta"]["content"] == text
        assert choice.get("token_ids", [5]) == [5]
        assert (choice["logprobs"] is None) == ("logprobs" not in fields)
