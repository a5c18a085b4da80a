"""Every kind of bad input over HTTP: a status and the field's name, without internal details."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.gateway_fakes import Harness, run_harness, tokens_of

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "1,"}]}
ANSWER = tokens_of("fine")
TOOL = {"type": "function", "function": {"name": "f"}}
MANY_BIASES = {str(token): 1 for token in range(301)}


@pytest.fixture
async def harness() -> AsyncIterator[Harness]:
    async with run_harness(lambda _: ANSWER) as running:
        yield running


def chat(**fields: Any) -> dict[str, Any]:
    return {**CHAT, **fields}


def make_message(**message: Any) -> dict[str, Any]:
    return {"messages": [message]}


COMPLETIONS: list[tuple[object, str | None, str]] = [
    # body, field, part of the sentence
    ({}, "prompt", "missing"),
    ({"prompt": None}, "prompt", "missing"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
    ({"prompt": 7}, "prompt", "must be a string, a list of strings"),
    ({"prompt": {"a": 1}}, "prompt", "must be a string"),
    ({"prompt": ["a", 1]}, "prompt", "must be a string"),
    ({"prompt": [1.5]}, "prompt", "must be a string"),
    ({"prompt": [True]}, "prompt", "must be a string"),
    ({"prompt": [-1]}, "prompt", "not negative"),
    ({"prompt": [10**30]}, "prompt", "must be a string"),
    ({"prompt": [999999]}, "prompt", "token id 999999 is outside the vocabulary of"),
    ({"prompt": "," * 600}, "prompt", "maximum context length is 512 tokens"),
    (
        {"prompt": "1,", "max_tokens": 511},
        "max_tokens",
        "513 tokens (2 in the messages, 511 in",
    ),
    ({"prompt": "1,", "max_tokens": 0}, "max_tokens", "at least 1"),
    ({"prompt": "1,", "max_tokens": 0, "stream": True}, "max_tokens", "at least 1"),
    ({"prompt": "1,", "max_tokens": -5}, "max_tokens", "at least 1"),
    ({"prompt": "1,", "max_tokens": 1.5}, "max_tokens", "integer"),
    ({"prompt": "1,", "max_tokens": "7"}, "max_tokens", "integer"),
    ({"prompt": "1,", "max_tokens": True}, "max_tokens", "integer"),
    ({"prompt": "1,", "max_tokens": 2**40}, "max_tokens", "less than or equal"),
    ({"prompt": "1,", "temperature": "hot"}, "temperature", "number"),
    ({"prompt": "1,", "temperature": -0.1}, "temperature", "between 0 and 2"),
    ({"prompt": "1,", "temperature": 2.1}, "temperature", "between 0 and 2"),
    (b'{"prompt": "1,", "temperature": 1e999}', "temperature", "finite"),
    (b'{"prompt": "1,", "temperature": NaN}', None, "NaN is not a number in JSON"),
    (b'{"prompt": "1,", "temperature": -Infinity}', None, "-Infinity is not a number"),
    ({"prompt": "1,", "top_p": 0}, "top_p", "above 0"),
    ({"prompt": "1,", "top_p": 1.01}, "top_p", "at most 1"),
    ({"prompt": "1,", "top_k": -2}, "top_k", "-1 for all"),
    ({"prompt": "1,", "top_k": 2**31}, "top_k", "less than"),
    ({"prompt": "1,", "min_p": 1.5}, "min_p", "between 0 and 1"),
    ({"prompt": "1,", "min_tokens": -1}, "min_tokens", "negative"),
    ({"prompt": "1,", "min_tokens": 9, "max_tokens": 5}, "min_tokens", "9 is over max_tokens, 5"),
    ({"prompt": "1,", "repetition_penalty": 0}, "repetition_penalty", "between 0.0001"),
    ({"prompt": "1,", "presence_penalty": 2.5}, "presence_penalty", "between -2 and 2"),
    ({"prompt": "1,", "frequency_penalty": -3}, "frequency_penalty", "between -2 and 2"),
    ({"prompt": "1,", "seed": 2**63}, "seed", "less than"),
    ({"prompt": "1,", "seed": 1.5}, "seed", "integer"),
    ({"prompt": "1,", "n": 0}, "n", "at least 1"),
    ({"prompt": "1,", "n": 129}, "n", "128"),
    ({"prompt": ["1,"] * 50, "n": 3}, "prompt", "at most 128 prompts x n"),
    ({"prompt": "1,", "logprobs": 21}, "logprobs", "between 0 and 20"),
    ({"prompt": "1,", "logprobs": True}, "logprobs", "integer"),
    ({"prompt": "1,", "stop": [""]}, "stop", "empty"),
    ({"prompt": "1,", "stop": ["x"] * 17}, "stop", "at most 16"),
    ({"prompt": "1,", "stop": "x" * 600}, "stop", "at most 512 characters"),
    ({"prompt": "1,", "stop": 3}, "stop", ""),
    ({"prompt": "1,", "ignore_eos": "yes"}, "ignore_eos", "boolean"),
    ({"prompt": "1,", "stream": 1}, "stream", "boolean"),
    ({"prompt": "1,", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
    ({"prompt": "1,", "stream_options": {"include_forecast": True}}, "stream_options", "stream"),
    (
        {"prompt": "1,", "stream": True, "stream_options": {"include_forecast": 1}},
        "stream_options.include_forecast",
        "boolean",
    ),
    ({"prompt": "1,", "echo": 1}, "echo", "boolean"),
    ({"prompt": "1,", "suffix": "end"}, "suffix", "not supported"),
    ({"prompt": "1,", "best_of": 2}, "best_of", "not supported"),
    ({"prompt": "1,", "logit_bias": {"5": 101}}, "logit_bias", "between -100 and 100, not 101"),
    ({"prompt": "1,", "logit_bias": {"5": "1"}}, "logit_bias", "number"),
    ({"prompt": "1,", "logit_bias": {"the": 1}}, "logit_bias", "'the' is not a token id"),
    ({"prompt": "1,", "logit_bias": {"-1": 1}}, "logit_bias", "'-1' is not a token id"),
    ({"prompt": "1,", "logit_bias": {"999999": 1}}, "logit_bias", "outside the vocabulary of"),
    ({"prompt": "1,", "logit_bias": MANY_BIASES}, "logit_bias", "at most 300 token ids, got 301"),
    ({"prompt": "1,", "logit_bias": [1]}, "logit_bias", "dictionary"),
    ({"prompt": "1,", "stop_token_ids": [999999]}, "stop_token_ids", "token id 999999 is outside"),
    ({"prompt": "1,", "stop_token_ids": [-1]}, "stop_token_ids", "greater than or equal to 0"),
    ({"prompt": "1,", "stop_token_ids": ["1"]}, "stop_token_ids", "integer"),
    ({"prompt": "1,", "stop_token_ids": [1] * 129}, "stop_token_ids", "at most 128 token ids"),
    ({"prompt": "1,", "allowed_token_ids": [9], "regex": "a"}, "allowed_token_ids", "a schema"),
    ({"prompt": "1,", "allowed_token_ids": []}, "allowed_token_ids", "must not be empty"),
    ({"prompt": "1,", "allowed_token_ids": [999999]}, "allowed_token_ids", "outside"),
    ({"prompt": "1,", "bad_words": [""]}, "bad_words", "a word must not be empty"),
    ({"prompt": "1,", "bad_words": [" "]}, "bad_words", "a word must not be empty"),
    ({"prompt": "1,", "bad_words": ["x"] * 129}, "bad_words", "at most 128 words, got 129"),
    ({"prompt": "1,", "bad_words": ["x" * 257]}, "bad_words", "at most 256 characters each"),
    ({"prompt": "1,", "bad_words": "x"}, "bad_words", "list"),
    ({"prompt": "1,", "prompt_logprobs": 21}, "prompt_logprobs", "between 0 and 20"),
    ({"prompt": "1,", "prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "with stream"),
    ({"prompt": "1,", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1, or -1"),
    ({"prompt": "1,", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least 1, or"),
    ({"prompt": "1,", "truncation_side": "right"}, "truncation_side", "not supported"),
    ({"prompt": "1,", "skip_special_tokens": 0}, "skip_special_tokens", "boolean"),
    ({"prompt": "1,", "priority": 2**31}, "priority", "less than or equal"),
    ({"prompt": "1,", "priority": "high"}, "priority", "integer"),
    ({"prompt": "1,", "request_id": "x" * 129}, "request_id", "at most 128 printable"),
    ({"prompt": "1,", "request_id": "a\nb"}, "request_id", "at most 128 printable"),
    ({"prompt": "1,", "use_beam_search": True}, "use_beam_search", "not supported"),
    ({"prompt": "1,", "length_penalty": 2.0}, "length_penalty", "not supported"),
    ({"prompt": "1,", "best_of": 3, "n": 2}, "best_of", "not supported"),
    ({"prompt": "1,", "cache_salt": 5}, "cache_salt", "string"),
    ({"prompt": "1,", "cache_salt": "s" * 257}, "cache_salt", "at most 256 characters"),
    ({"prompt": "1,", "user": 5}, "user", "string"),
    ({"prompt": "1,", "user": "s" * 257}, "user", "at most 256 characters"),
    ({"prompt": "1,", "model": 5}, "model", "string"),
    (b"", None, "not valid JSON"),
    (b"{", None, "not valid JSON"),
    (b"[1]", None, "must be a JSON object"),
    (b'"x"', None, "must be a JSON object"),
    (b"[" * 100_000, None, "not valid JSON"),
    (b'{"prompt": "\xff\xfe"}', None, "not valid UTF-8"),
    (b'{"prompt": "\\ud83d alone"}', None, "not valid UTF-8"),
    (b'{"seed": ' + b"9" * 5000 + b"}", None, "not valid JSON"),
]

CHATS: list[tuple[object, str | None, str]] = [
    ({}, "messages", "must not be empty"),
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": ["hi"]}, "messages[0]", "object"),
    (make_message(role="user", content=""), "messages", "must not all be empty"),
    (make_message(role="user", content=5), "messages[0].content", "must be a string or a list"),
    (
        make_message(role="wizard", content="x"),
        "messages[0].role",
        "known: system, user, assistant",
    ),
    (
        make_message(role="tool", content="x"),
        "messages[0].tool_call_id",
        "is missing; it must be the id of the call",
    ),
    (make_message(content="x"), "messages[0].role", "must be a string"),
    (
        make_message(role="user", content=[{"type": "image_url"}]),
        "messages[0].content[0]",
        "image_url",
    ),
    (
        make_message(role="user", content=[{"type": "text"}]),
        "messages[0].content[0].text",
        "string",
    ),
    (
        make_message(role="assistant", content="x", tool_calls=[{}]),
        "messages[0].tool_calls[0]",
        "must be an object with id, type and function",
    ),
    (chat(tools=[{"type": "function"}]), "tools[0].function", "must be an object with a name"),
    (chat(tool_choice="required"), "tool_choice", "needs tools"),
    (chat(functions=[{}]), "functions", "not supported"),
    (chat(function_call={"name": "f"}), "function_call", "not supported"),
    (chat(response_format={"type": "yaml"}), "response_format.type", "must be one of"),
    (chat(logit_bias={"1": 500}), "logit_bias", "between -100 and 100"),
    (chat(response_format={"type": "text", "x": 1}), "response_format.x", "remove it"),
    (chat(modalities=["text", "audio"]), "modalities", "not supported"),
    (chat(audio={"voice": "x"}), "audio", "not supported"),
    (chat(web_search_options={"x": 1}), "web_search_options", "not supported"),
    (
        chat(continue_final_message=True, add_generation_prompt=True),
        "continue_final_message",
        "cannot be true if add_generation_prompt is true",
    ),
    (
        chat(chat_template_kwargs={"add_generation_prompt": False}),
        "chat_template_kwargs",
        "cannot set add_generation_prompt",
    ),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", "cannot set messages"),
    (chat(chat_template_kwargs={"tools": []}), "chat_template_kwargs", "cannot set tools"),
    (chat(chat_template_kwargs={"chat_template": "x"}), "chat_template_kwargs", "cannot set chat_"),
    (chat(chat_template_kwargs={"a": "x" * 20_000}), "chat_template_kwargs", "at most 16384"),
    (chat(chat_template_kwargs="x"), "chat_template_kwargs", "dictionary"),
    (chat(chat_template="{{ messages }}"), "chat_template", "not supported"),
    (chat(documents=[{"text": "x"}]), "documents", "not supported"),
    (chat(top_logprobs=3), "top_logprobs", "logprobs"),
    (chat(logprobs=True, top_logprobs=21), "logprobs", "between 0 and 20"),
    (chat(logprobs=3), "logprobs", "boolean"),
    (chat(max_tokens=5, max_completion_tokens=6), "max_tokens", "max_completion_tokens"),
    (chat(max_completion_tokens=600), "max_tokens", "600 in the completion"),
    (chat(max_tokens=0), "max_tokens", "must be at least 1, not 0"),
    (chat(max_completion_tokens=0), "max_tokens", "must be at least 1, not 0"),
    (chat(cache_salt=["a"]), "cache_salt", "string"),
    (chat(cache_salt="s" * 257), "cache_salt", "at most 256 characters"),
]


async def check_refusal(
    harness: Harness, path: str, body: object, field: str | None, part: str
) -> None:
    reply = await harness.http("POST", path, body)
    error = reply.json["error"]
    assert (reply.status, error["param"]) == (400, field), error
    assert part in error["message"]
    assert error["type"] == "invalid_request_error"
    assert "Traceback" not in reply.text and "/gateway" not in reply.text


async def test_bad_completions_are_400_naming_the_field(harness: Harness) -> None:
    for body, field, part in COMPLETIONS:
        await check_refusal(harness, "/v1/completions", body, field, part)
    assert not harness.scheduler.requests
    assert harness.gateway.live == 0


async def test_bad_chats_are_400_naming_the_field(harness: Harness) -> None:
    for body, field, part in CHATS:
        await check_refusal(harness, "/v1/chat/completions", body, field, part)
    assert not harness.scheduler.requests


async def test_bad_stream_request_has_an_error_status(harness: Harness) -> None:
    await check_refusal(
        harness, "/v1/completions", {"prompt": "", "stream": True}, "prompt", "empty"
    )


@pytest.mark.parametrize(
    ("header", "value", "part"),
    [
        ("x-foretoken-sla", "gold", "unknown class 'gold'; known: interactive, standard, batch"),
        ("x-foretoken-sla", "ttft_s=-1", "ttft_s must be a positive number"),
        ("x-foretoken-sla", "ttft_s=nan", "ttft_s must be a positive number"),
        ("x-foretoken-sla", "ttft_s=x", "must be a number of seconds"),
        ("x-foretoken-sla", "speed=1", "known: ttft_s, tpot_s, mtpot_s"),
        ("x-request-timeout-s", "soon", "must be seconds"),
        ("x-request-timeout-s", "0", "positive"),
        ("x-request-timeout-s", "-1", "positive"),
        ("x-request-timeout-s", "nan", "positive"),
        ("x-request-timeout-s", "inf", "positive"),
        ("x-foretoken-application", "a" * 300, "at most 256"),
    ],
)
async def test_bad_headers_are_400(harness: Harness, header: str, value: str, part: str) -> None:
    reply = await harness.http("POST", "/v1/completions", {"prompt": "1,"}, {header: value})
    assert reply.status == 400
    assert part in reply.json["error"]["message"]


async def test_tools_are_refused_where_the_template_does_not_show_them(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text("{{ messages[0].content }}")
    async with run_harness(lambda _: ANSWER, chat_template=str(template)) as harness:
        part = "does not show tools to the model"
        await check_refusal(harness, "/v1/chat/completions", chat(tools=[TOOL]), "tools", part)


async def test_unknown_model_is_404(harness: Harness) -> None:
    for reply in (
        await harness.http("POST", "/v1/completions", {"prompt": "1,", "model": "gpt-9"}),
        await harness.http("POST", "/v1/chat/completions", chat(model="gpt-9")),
        await harness.http("GET", "/v1/models/gpt-9"),
    ):
        error = reply.json["error"]
        assert (reply.status, error["code"]) == (404, "model_not_found")
        assert error["message"] == "model: 'gpt-9' is not served here; known: demo"


async def test_unknown_path_or_method_is_named(harness: Harness) -> None:
    for method, path, status in (("GET", "/v1/moderations", 404), ("GET", "/v1/completions", 405)):
        reply = await harness.http(method, path)
        assert reply.status == status
        assert path in reply.json["error"]["message"]


async def test_too_large_body_is_413() -> None:
    async with run_harness(lambda _: ANSWER, max_body_bytes=1000) as harness:
        reply = await harness.http("POST", "/v1/completions", {"prompt": "x" * 1000})
        assert (reply.status, reply.json["error"]["code"]) == (413, "body_too_large")
        assert (await harness.http("POST", "/v1/completions", {"prompt": "x"})).status == 200


async def test_fields_without_effect_are_accepted(harness: Harness) -> None:
    extra = {
        "metadata": {"a": "b"}, "store": True, "service_tier": "auto",
        "parallel_tool_calls": False, "safety_identifier": "x", "prompt_cache_key": "y",
        "prediction": {"type": "content", "content": "x"}, "tools": [], "tool_choice": "none",
        "response_format": {"type": "text"}, "logit_bias": {}, "modalities": ["text"],
        "temperature": None, "stop": None, "max_tokens": None, "stream_options": None,
        "functions": None, "n": None, "seed": 3, "reasoning_effort": None, "verbosity": "low",
    }  # fmt: skip
    turns = [
        {"role": "developer", "content": "be kind", "name": "x"},
        {"role": "user", "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]},
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "audio": None},
        {"role": "user", "content": "2"},
    ]
    reply = await harness.http("POST", "/v1/chat/completions", {"messages": turns, **extra})
    assert reply.status == 200, reply.text
    result = harness.scheduler.requests[0].text
    assert (result.instruction, result.user_input) == ("be kind", "2")
    body = {"prompt": "1,", "echo": False, "suffix": "", "best_of": 2, "n": 2, "logit_bias": {}}
    assert (await harness.http("POST", "/v1/completions", body)).status == 200


async def test_internal_error_reveals_no_details(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(harness.gateway.intake, "parse", broken)
    reply = await harness.http("POST", "/v1/completions", {"prompt": "1,"})
    assert reply.status == 500
    assert json.loads(reply.text)["error"]["type"] == "server_error"
    assert "secret" not in reply.text
