"""Every field that Anthropic defines for `/v1/messages`, and its handling."""

from collections.abc import Mapping

from gateway.faces.http.dialect.fields import (
    CHAT,
    SHARED_FIELDS,
    FieldRule,
    ignored,
    refused,
    supported,
)

# Fields of the other endpoints that apply here, too.
SAMPLING_EXTRAS = (
    *("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"),
    *("min_tokens", "ignore_eos", "stop_token_ids", "logit_bias", "allowed_token_ids"),
    *("bad_words", "include_stop_str_in_output", "skip_special_tokens"),
    *("spaces_between_special_tokens", "truncate_prompt_tokens", "cache_salt", "priority"),
    "structured_outputs",
)
EXTRAS: Mapping[str, FieldRule] = {
    **{name: SHARED_FIELDS[name] for name in SAMPLING_EXTRAS},
    "chat_template_kwargs": CHAT["chat_template_kwargs"],
    "thinking_token_budget": CHAT["thinking_token_budget"],
}

MESSAGES_FIELDS: Mapping[str, FieldRule] = {
    "model": SHARED_FIELDS["model"],
    "messages": supported("roles user and assistant; blocks text, tool_use, tool_result, thinking"),
    "max_tokens": supported("required, except to count tokens"),
    "system": supported("a string or text blocks"),
    "stop_sequences": supported("at most 16 strings of 512 characters"),
    "stream": SHARED_FIELDS["stream"],
    "temperature": SHARED_FIELDS["temperature"],
    "top_p": SHARED_FIELDS["top_p"],
    "top_k": SHARED_FIELDS["top_k"],
    "metadata": supported("`user_id`: tenant for fair sharing"),
    "thinking": supported("`type`; `budget_tokens`, if the model's reasoning has marks"),
    "output_config": supported("`format`: a JSON schema of the answer; `effort`"),
    "output_format": supported("older name of `output_config.format`"),
    "tools": supported("with `input_schema`; see Tools and reasoning"),
    "tool_choice": supported("`auto`, `any`, `tool`, `none`; `disable_parallel_tool_use`"),
    "cache_control": ignored("cached prefixes are found by content"),
    "context_management": ignored("the conversation is used as it is sent"),
    "service_tier": ignored("use the header `x-foretoken-sla`"),
    "speed": ignored("use the header `x-foretoken-sla`"),
    "inference_geo": ignored("the server has one place"),
    "diagnostics": ignored("`usage` reports the cached tokens"),
    "billing_policy": ignored("nothing is billed"),
    "fallbacks": ignored("the server does not refuse an answer for its content"),
    "fallback_credit_token": ignored("nothing is billed"),
    "betas": ignored("the header `anthropic-beta` is accepted, too"),
    "user_profile_id": ignored("use `metadata.user_id`"),
    "workspace_id": ignored("use the API key"),
    "stop": refused("use `stop_sequences`"),
    "max_completion_tokens": refused("use `max_tokens`"),
    "response_format": refused("use `output_config.format`"),
    "reasoning_effort": refused("use `output_config.effort`"),
    "n": refused("a request has one answer", 1),
    "container": refused("the server runs no tools"),
    "mcp_servers": refused("the server runs no tools"),
    "compaction": refused("the conversation is used as it is sent"),
    "thread": refused("the server stores no threads"),
    **EXTRAS,
}
