"""The field table is complete, matches the bodies, and refuses only values with an effect."""

from typing import Any

import openai.types.chat.completion_create_params as openai_chat
import openai.types.completion_create_params as openai_completion
import pytest

from gateway.faces.http.dialect.fields import (
    ALIASES,
    CHAT_FIELDS,
    COMPLETION_FIELDS,
    FieldRule,
    Handling,
)
from gateway.faces.http.dialect.page import PAGE, render_page
from gateway.faces.http.schema import Body, ChatBody, CompletionBody, read_body
from services.runtime.errors import InvalidArgument

# Fields of vLLM 0.32's request classes.
VLLM_BOTH = """model frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop
stream stream_options temperature top_p user use_beam_search top_k min_p repetition_penalty
watermarking length_penalty stop_token_ids include_stop_str_in_output ignore_eos min_tokens
skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
allowed_token_ids prompt_logprobs logprob_token_ids bad_words add_special_tokens response_format
structured_outputs priority request_id session_id return_tokens_as_token_ids return_token_ids
routed_experts_prompt_start return_token_offsets mm_payload return_mm_kwargs cache_salt
kv_transfer_params ec_transfer_params vllm_xargs repetition_detection thinking_token_budget
stream_interval echo"""
VLLM_COMPLETION = f"{VLLM_BOTH} prompt suffix prompt_embeds"
VLLM_CHAT = f"""{VLLM_BOTH} messages top_logprobs max_completion_tokens tools tool_choice
reasoning_effort include_reasoning parallel_tool_calls add_generation_prompt continue_final_message
documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
return_prompt_text"""
# Additional fields of SGLang.
SGLANG_BOTH = """return_hidden_states return_routed_experts routed_experts_start_len regex ebnf
return_cached_tokens_details stop_regex no_stop_trim lora_path session_params custom_params
custom_logit_processor images_config bootstrap_host bootstrap_port bootstrap_room routed_dp_rank
disagg_prefill_dp_rank data_parallel_rank rid extra_key ngram_corpus_id"""
SGLANG_COMPLETION = f"{SGLANG_BOTH} best_of json_schema custom_labels"
SGLANG_CHAT = f"""{SGLANG_BOTH} return_prompt_token_ids return_meta_info task separate_reasoning
stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video input_ids"""

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"prompt": "hi"}
BODIES: list[tuple[type[Body], dict[str, Any]]] = [(ChatBody, CHAT), (CompletionBody, COMPLETION)]


def refusals() -> list[tuple[type[Body], dict[str, Any], str, FieldRule]]:
    return [
        (kind, body, name, known)
        for kind, body in BODIES
        for name, known in kind.fields.items()
        if known.handling is Handling.REFUSED
    ]


@pytest.mark.parametrize(
    ("fields", "defined"),
    [
        (CHAT_FIELDS, openai_chat.CompletionCreateParamsBase.__annotations__),
        (COMPLETION_FIELDS, openai_completion.CompletionCreateParamsBase.__annotations__),
        (CHAT_FIELDS, VLLM_CHAT.split()),
        (COMPLETION_FIELDS, VLLM_COMPLETION.split()),
        (CHAT_FIELDS, SGLANG_CHAT.split()),
        (COMPLETION_FIELDS, SGLANG_COMPLETION.split()),
    ],
    ids=["openai-chat", "openai", "vllm-chat", "vllm", "sglang-chat", "sglang"],
)
def test_every_known_field_has_a_rule(fields: dict[str, FieldRule], defined: list[str]) -> None:
    assert {*defined} - fields.keys() == set()


@pytest.mark.parametrize("kind", [ChatBody, CompletionBody])
def test_supported_fields_are_the_body_s_fields(kind: type[Body]) -> None:
    honoured = {name for name, known in kind.fields.items() if known.handling is Handling.SUPPORTED}
    assert honoured - ALIASES.keys() == kind.model_fields.keys()
    assert honoured >= ALIASES.keys()
    assert kind.model_fields.keys() >= {*ALIASES.values()}


def test_each_field_has_a_short_note() -> None:
    for rule in (*CHAT_FIELDS.values(), *COMPLETION_FIELDS.values()):
        assert 0 < len(rule.note) < 80 or rule.handling is Handling.IGNORED


def test_field_reference_page_is_up_to_date() -> None:
    """`python -m gateway.faces.http.dialect.page` writes it."""
    assert PAGE.read_text() == render_page()


@pytest.mark.parametrize("case", refusals(), ids=lambda case: f"{case[0].__name__}-{case[2]}")
def test_refused_field_accepts_values_without_effect(
    case: tuple[type[Body], dict[str, Any], str, FieldRule],
) -> None:
    kind, body, name, known = case
    for fine in (None, [], {}, "", *known.no_op):
        read_body(kind, {**body, name: fine})
    for value in ({"x": 1}, ["x"], "x", 7, True):
        with pytest.raises(InvalidArgument) as caught:
            read_body(kind, {**body, name: value})
        assert caught.value.field == name


def test_ignored_field_accepts_any_value() -> None:
    for kind, body in BODIES:
        ignored = [
            name for name, known in kind.fields.items() if known.handling is Handling.IGNORED
        ]
        values: tuple[object, ...] = ("x", 7, [{}], {"x": [1]}, True, None)
        for value in values:
            read = read_body(kind, {**body, **dict.fromkeys(ignored, value)})
            assert (read, read.unknown) == (read_body(kind, body), [])


def test_unknown_fields_are_named_with_their_place() -> None:
    turns = [
        {"role": "user", "content": "a", "wish": 1, "name": "x"},
        {"role": "user", "content": "b", "wish": 2, "hope": None},
    ]
    options = {"include_usage": True, "obscure": 1}
    fields = {"messages": turns, "temprature": 1, "stream": True, "stream_options": options}
    body = read_body(ChatBody, {**fields, "unset": None})
    assert body.unknown == [
        "temprature", "messages[].hope", "messages[].wish", "stream_options.obscure",
    ]  # fmt: skip
    assert body.stream_options.include_usage


def test_sglang_aliases_yield_to_vllm_names() -> None:
    body = read_body(CompletionBody, {**COMPLETION, "rid": "a", "no_stop_trim": True})
    assert (body.request_id, body.include_stop_str_in_output) == ("a", True)
    for fields in ({"rid": "a", "request_id": "b"}, {"request_id": "b", "rid": "a"}):
        assert read_body(CompletionBody, {**COMPLETION, **fields}).request_id == "b"
