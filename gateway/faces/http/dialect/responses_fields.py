"""Every field that OpenAI defines for `/v1/responses`, and its handling."""

from collections.abc import Mapping

from gateway.faces.http.dialect.fields import (
    CHAT,
    SHARED_FIELDS,
    FieldRule,
    ignored,
    refused,
    supported,
)
from gateway.faces.http.dialect.messages_fields import EXTRAS

SAME_AS_CHAT = (
    *("service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options"),
    *("prompt_cache_retention", "tools", "tool_choice", "parallel_tool_calls"),
)

RESPONSES_FIELDS: Mapping[str, FieldRule] = {
    "model": SHARED_FIELDS["model"],
    "input": supported("a string, or items: message, function_call, function_call_output"),
    "instructions": supported("a system message before the conversation"),
    "previous_response_id": supported("continues a stored response of the same API key"),
    "store": supported("false: the response cannot be named again"),
    "background": supported("runs without a connection; poll or stream `GET /v1/responses/{id}`"),
    "stream": SHARED_FIELDS["stream"],
    "temperature": SHARED_FIELDS["temperature"],
    "top_p": SHARED_FIELDS["top_p"],
    "top_k": SHARED_FIELDS["top_k"],
    "max_output_tokens": supported("default: the remaining context"),
    "text": supported("`format`: `text`, `json_object`, `json_schema`; `verbosity` has no effect"),
    "reasoning": supported("`effort`; `none` sets the template's `enable_thinking` false"),
    "truncation": supported("`auto` keeps the last tokens that fit"),
    "metadata": supported("returned with the response"),
    "include": supported("`message.output_text.logprobs`; other names of OpenAI add nothing"),
    "user": SHARED_FIELDS["user"],
    "stop": SHARED_FIELDS["stop"],
    "personality": ignored("a field of `input_tokens`; no chat template uses it"),
    "stream_options": ignored("usage is always reported, and events are not padded"),
    "background_options": ignored("use the header `x-foretoken-sla`"),
    "max_tool_calls": ignored("the server runs no tools"),
    "top_logprobs": supported("0 to 20, with `include` `message.output_text.logprobs`"),
    "messages": refused("use `input`"),
    "max_tokens": refused("use `max_output_tokens`"),
    "max_completion_tokens": refused("use `max_output_tokens`"),
    "response_format": refused("use `text.format`"),
    "reasoning_effort": refused("use `reasoning.effort`"),
    "n": refused("a request has one response", 1),
    "conversation": refused("use `previous_response_id`"),
    "prompt": refused("the server stores no prompts; send `instructions` and `input`"),
    "context_management": refused("use `truncation`"),
    "image": refused("only text input is supported"),
    "moderation": refused("not implemented"),
    "access_programs": ignored("every model is open"),
    **{name: CHAT[name] for name in SAME_AS_CHAT},
    **EXTRAS,
}
