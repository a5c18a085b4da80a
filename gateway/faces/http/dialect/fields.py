"""Every request field that OpenAI, vLLM and SGLang define for the two endpoints, and its handling.

A null field counts as absent. A refused field raises an error only if its value would change the
answer: an empty list or object, and the values listed in `no_op`, are accepted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

NOT_SUPPORTED = "is not supported by this server; remove it (see /docs for all fields)"


class Handling(StrEnum):
    """What the server does with a field."""

    SUPPORTED = "supported"
    IGNORED = "ignored"  # the field does not change the answer
    REFUSED = "refused"  # the field would change the answer


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One field: its handling, a note for the documentation, and values equal to leaving it out."""

    handling: Handling
    note: str = ""
    no_op: tuple[object, ...] = ()

    def changes_answer(self, value: object) -> bool:
        """Whether this value of a refused field would change the answer. True does not equal 1."""
        if value in ([], {}, ""):
            return False
        return not any(type(value) is type(same) and value == same for same in self.no_op)


def supported(note: str) -> FieldRule:
    return FieldRule(Handling.SUPPORTED, note)


def ignored(note: str) -> FieldRule:
    return FieldRule(Handling.IGNORED, note)


def refused(note: str, *no_op: object) -> FieldRule:
    return FieldRule(Handling.REFUSED, note, no_op)


SHARED_FIELDS: Mapping[str, FieldRule] = {
    "model": supported("name of the served model; optional"),
    "temperature": supported("0 to 2; 0 is greedy"),
    "top_p": supported("above 0, at most 1"),
    "top_k": supported("0 or -1 disables it"),
    "min_p": supported("0 to 1"),
    "repetition_penalty": supported("1 disables it"),
    "presence_penalty": supported("-2 to 2"),
    "frequency_penalty": supported("-2 to 2"),
    "seed": supported("the same seed gives the same answer"),
    "n": supported("prompts × n: at most 128 choices"),
    "stop": supported("at most 16 strings of 512 characters"),
    "stop_token_ids": supported("at most 128"),
    "include_stop_str_in_output": supported("applies to stop tokens too"),
    "no_stop_trim": supported("SGLang's name for `include_stop_str_in_output`"),
    "ignore_eos": supported("generates until `max_tokens`"),
    "max_tokens": supported("default: 16 for a completion, the remaining context for a chat"),
    "min_tokens": supported("no stop before this many tokens"),
    "logit_bias": supported("-100 to 100; at most 300 tokens"),
    "allowed_token_ids": supported("samples only these tokens; not with a constraint"),
    "bad_words": supported("at most 128; each also with a leading space"),
    "prompt_logprobs": supported("0 to 20; not with `stream`"),
    "skip_special_tokens": supported("false: special tokens appear in the text"),
    "spaces_between_special_tokens": supported("for tokenizers that insert such spaces"),
    "truncate_prompt_tokens": supported("keeps the last tokens; -1: as many as fit"),
    "truncation_side": refused("truncation keeps the last tokens", "left"),
    "add_special_tokens": supported("such as BOS; default: true, for a chat false"),
    "return_token_ids": supported("adds `prompt_token_ids` and `token_ids`"),
    "stream": supported("server-sent events"),
    "stream_options": supported(
        "`include_usage`, `continuous_usage_stats`, `include_forecast` (foretoken)"
    ),
    "user": supported("tenant for fair sharing"),
    "cache_salt": supported("only prompts with the same salt share cached prefixes"),
    "priority": supported("lower values run first"),
    "request_id": supported("id of the answer; at most 128 characters"),
    "rid": supported("SGLang's name for `request_id`"),
    "response_format": supported("`text`, `json_object`, `json_schema`, `structural_tag`"),
    "structured_outputs": supported("one constraint of the answer; see Structured output"),
    "guided_json": supported("older name of `structured_outputs.json`"),
    "guided_regex": supported("older name of `structured_outputs.regex`"),
    "guided_choice": supported("older name of `structured_outputs.choice`"),
    "guided_grammar": supported("older name of `structured_outputs.grammar`"),
    "json_schema": supported("SGLang's name for `structured_outputs.json`"),
    "regex": supported("SGLang's name for `structured_outputs.regex`"),
    "ebnf": supported("SGLang's name for `structured_outputs.grammar`"),
    "guided_whitespace_pattern": refused("use `structured_outputs.whitespace_pattern`"),
    "guided_json_object": refused('use `response_format` `{"type": "json_object"}`', False),
    "guided_decoding_backend": ignored("there is one backend, llguidance"),
    "session_id": ignored("cached prefixes are found by content"),
    "stream_interval": ignored("the load sets the chunk interval"),
    "return_token_offsets": ignored("only used by vLLM's render endpoints"),
    "mm_payload": ignored("only used by vLLM's render endpoints"),
    "return_mm_kwargs": ignored("only used by vLLM's render endpoints"),
    "custom_labels": ignored("metrics carry no client labels"),
    "routed_dp_rank": ignored("the scheduler selects the worker"),
    "disagg_prefill_dp_rank": ignored("the scheduler selects the worker"),
    "data_parallel_rank": ignored("the scheduler selects the worker"),
    "return_cached_tokens_details": ignored("`usage` reports the cached tokens"),
    "use_beam_search": refused("only sampling is implemented", False),
    "length_penalty": refused("applies to beam search only", 1.0, 1),
    "watermarking": refused("not implemented", False),
    "logprob_token_ids": refused("`logprobs` returns the most likely tokens"),
    "return_tokens_as_token_ids": refused("use `return_token_ids`", False),
    "stop_regex": refused("use `stop` with strings"),
    "repetition_detection": refused("use `repetition_penalty`"),
    "routed_experts_prompt_start": refused("expert routing is not reported", 0),
    "return_routed_experts": refused("expert routing is not reported", False),
    "routed_experts_start_len": refused("expert routing is not reported", 0),
    "return_hidden_states": refused("hidden states are not returned", False),
    "kv_transfer_params": refused("prefill/decode disaggregation is not implemented"),
    "ec_transfer_params": refused("prefill/decode disaggregation is not implemented"),
    "bootstrap_host": refused("prefill/decode disaggregation is not implemented"),
    "bootstrap_port": refused("prefill/decode disaggregation is not implemented"),
    "bootstrap_room": refused("prefill/decode disaggregation is not implemented"),
    "vllm_xargs": refused("arguments of vLLM plug-ins"),
    "custom_params": refused("arguments of SGLang plug-ins"),
    "custom_logit_processor": refused("the server does not run client code"),
    "lora_path": refused("name the adapter in `model`"),
    "session_params": refused("SGLang sessions are not implemented"),
    "extra_key": refused("use `cache_salt` to separate cached prefixes"),
    "ngram_corpus_id": refused("drafts come from the request's own text"),
    "images_config": refused("only text input is supported"),
}

COMPLETION: Mapping[str, FieldRule] = {
    "prompt": supported("a string, a list of strings, token ids, or a list of token id lists"),
    "logprobs": supported("0 to 20"),
    "echo": supported("prompt before the answer; scored with `logprobs`; allows `max_tokens` 0"),
    "best_of": refused("every generated choice is returned; must equal `n`", 1),
    "suffix": refused("text is only appended to a prompt"),
    "thinking_token_budget": refused("reasoning is separated in chat answers only", -1),
    "prompt_embeds": refused("only strings and token ids are accepted"),
}

CHAT: Mapping[str, FieldRule] = {
    "messages": supported("roles system, developer, user, assistant, tool; text parts only"),
    "max_completion_tokens": supported("same as `max_tokens`"),
    "logprobs": supported("true or false"),
    "top_logprobs": supported("0 to 20, with `logprobs`"),
    "echo": supported("the last message before the answer, if its role is assistant"),
    "chat_template_kwargs": supported("arguments of the chat template; at most 16,384 characters"),
    "add_generation_prompt": supported("false: the template does not open an assistant turn"),
    "continue_final_message": supported("the answer continues the last message"),
    "reasoning_effort": supported("for templates that use it; `none` sets `enable_thinking` false"),
    "verbosity": ignored("no chat template uses it"),
    "metadata": ignored("nothing is stored"),
    "store": ignored("nothing is stored"),
    "service_tier": ignored("use the header `x-foretoken-sla`"),
    "safety_identifier": ignored("use `user`"),
    "prompt_cache_key": ignored("cached prefixes are found by content"),
    "prompt_cache_options": ignored("cached prefixes are found by content"),
    "prompt_cache_retention": ignored("cached prefixes are found by content"),
    "prediction": ignored("it only speeds up the answer"),
    "tools": supported("functions that the model may call; see Tools and reasoning"),
    "tool_choice": supported("`none`, `auto`, `required`, a function or `allowed_tools`"),
    "parallel_tool_calls": supported("false: at most one call in an answer"),
    "thinking_token_budget": supported("the most tokens of reasoning; -1: no limit"),
    "include_reasoning": supported("false: the answer is sent without its reasoning"),
    "separate_reasoning": supported("false: reasoning is part of the content"),
    "stream_reasoning": ignored("reasoning is streamed as it is generated"),
    "media_io_kwargs": ignored("only text input is supported"),
    "mm_processor_kwargs": ignored("only text input is supported"),
    "max_dynamic_patch": ignored("only text input is supported"),
    "min_dynamic_patch": ignored("only text input is supported"),
    "use_audio_in_video": ignored("only text input is supported"),
    "functions": refused("deprecated OpenAI name for `tools`"),
    "function_call": refused("deprecated OpenAI name for `tool_choice`", "none", "auto"),
    "modalities": refused("only text output is supported", ["text"]),
    "audio": refused("only text output is supported"),
    "web_search_options": refused("not implemented"),
    "moderation": refused("not implemented"),
    "documents": refused("put documents into a message"),
    "chat_template": refused("the server uses the model's template"),
    "return_prompt_text": refused("use `return_token_ids`", False),
    "return_prompt_token_ids": refused("use `return_token_ids`", False),
    "return_meta_info": refused("`usage` reports token counts", False),
    "input_ids": refused("use `/v1/completions` for token ids"),
    "task": refused("specific to one model's template"),
}

# Chat fields that clients also send to the completions endpoint.
IGNORED_IN_COMPLETIONS = frozenset(
    ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
     "prompt_cache_options", "prompt_cache_retention", "prediction")
)  # fmt: skip
COMPLETION_FIELDS: Mapping[str, FieldRule] = {
    **SHARED_FIELDS,
    **COMPLETION,
    "parallel_tool_calls": ignored("has no effect without `tools`"),
    **{name: CHAT[name] for name in CHAT if name in IGNORED_IN_COMPLETIONS},
}
CHAT_FIELDS: Mapping[str, FieldRule] = {**SHARED_FIELDS, **CHAT}

# SGLang names of supported fields → the names used here.
ALIASES = {"no_stop_trim": "include_stop_str_in_output", "rid": "request_id"}

# Fields of one chat message. A refused field may be null or empty.
MESSAGE: Mapping[str, FieldRule] = {
    "role": supported(""),
    "content": supported(""),
    "name": supported("of the function, in a tool message"),
    "annotations": ignored(""),
    "refusal": ignored(""),
    "audio": ignored("belongs to an earlier answer"),
    "reasoning": supported("for templates that show earlier reasoning"),
    "reasoning_content": supported("for templates that show earlier reasoning"),
    "tool_calls": supported("of an earlier answer"),
    "tool_call_id": supported("of a tool message"),
    "function_call": refused("deprecated OpenAI name for `tool_calls`"),
}
