"""Every field that OpenAI, vLLM and SGLang define for the two endpoints, and what becomes of each.

A field that is null counts as absent. What is refused is refused by name, and only where its value
would change the answer: an empty list or object never does, nor does any of `no_op`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Fate(StrEnum):
    """What becomes of a field."""

    HONOURED = "honoured"
    IGNORED = "ignored"  # it does not change the answer
    REFUSED = "refused"  # it would


@dataclass(frozen=True, slots=True)
class Known:
    """One field: its fate, a few words for people, and the values that are as if it were absent."""

    fate: Fate
    words: str = ""
    no_op: tuple[object, ...] = ()

    def changes(self, value: object) -> bool:
        """Whether a value of a refused field would change the answer. True is not 1 here."""
        if value in ([], {}, ""):
            return False
        return not any(type(value) is type(same) and value == same for same in self.no_op)


def honoured(words: str) -> Known:
    return Known(Fate.HONOURED, words)


def ignored(words: str) -> Known:
    return Known(Fate.IGNORED, words)


def refused(words: str, *no_op: object) -> Known:
    return Known(Fate.REFUSED, words, no_op)


BOTH: Mapping[str, Known] = {
    "model": honoured("the served model's name; may be left out"),
    "temperature": honoured("0 to 2; 0 is greedy"),
    "top_p": honoured("above 0, at most 1"),
    "top_k": honoured("0 or -1: off"),
    "min_p": honoured("0 to 1"),
    "repetition_penalty": honoured("1 is off"),
    "presence_penalty": honoured("-2 to 2"),
    "frequency_penalty": honoured("-2 to 2"),
    "seed": honoured("the same answer again"),
    "n": honoured("prompts × n: at most 128 choices"),
    "stop": honoured("at most 16 strings of 512 characters"),
    "stop_token_ids": honoured("at most 128"),
    "include_stop_str_in_output": honoured("of the stop token too"),
    "no_stop_trim": honoured("SGLang's word for `include_stop_str_in_output`"),
    "ignore_eos": honoured("goes on to `max_tokens`"),
    "max_tokens": honoured("unset: 16 for a completion, what fits for a chat"),
    "min_tokens": honoured("no stop before"),
    "logit_bias": honoured("-100 to 100; at most 300 tokens"),
    "allowed_token_ids": honoured("no other token is drawn"),
    "bad_words": honoured("at most 128; each also behind a space"),
    "prompt_logprobs": honoured("0 to 20; not with `stream`"),
    "skip_special_tokens": honoured("false: they are text"),
    "spaces_between_special_tokens": honoured("where a tokenizer puts any"),
    "truncate_prompt_tokens": honoured("keeps the last; -1: what fits"),
    "truncation_side": refused("the last tokens are kept", "left"),
    "add_special_tokens": honoured("as BOS; unset: true, of a chat false"),
    "return_token_ids": honoured("`prompt_token_ids` and `token_ids`"),
    "stream": honoured("server-sent events"),
    "stream_options": honoured(
        "`include_usage`, `continuous_usage_stats`, `include_forecast` (ours)"
    ),
    "user": honoured("whose share of the server it counts to"),
    "cache_salt": honoured("only prompts of the same salt share cached prefixes"),
    "priority": honoured("lower goes before higher"),
    "request_id": honoured("the answer's id; at most 128 characters"),
    "rid": honoured("SGLang's word for `request_id`"),
    "session_id": ignored("prefixes are found by their content"),
    "stream_interval": ignored("chunks are paced by load"),
    "return_token_offsets": ignored("vLLM: of its render endpoints alone"),
    "mm_payload": ignored("vLLM: of its render endpoints alone"),
    "return_mm_kwargs": ignored("vLLM: of its render endpoints alone"),
    "custom_labels": ignored("metrics have no labels of clients"),
    "routed_dp_rank": ignored("the scheduler places requests"),
    "disagg_prefill_dp_rank": ignored("the scheduler places requests"),
    "data_parallel_rank": ignored("the scheduler places requests"),
    "return_cached_tokens_details": ignored("`usage` tells the cached tokens"),
    "use_beam_search": refused("answers are sampled", False),
    "length_penalty": refused("of beam search", 1.0, 1),
    "watermarking": refused("of the engine", False),
    "logprob_token_ids": refused("`logprobs` gives the likeliest"),
    "return_tokens_as_token_ids": refused("`return_token_ids` gives them", False),
    "response_format": refused("structured output is yet to come", {"type": "text"}),
    "structured_outputs": refused("structured output is yet to come"),
    "json_schema": refused("structured output is yet to come"),
    "regex": refused("structured output is yet to come"),
    "ebnf": refused("structured output is yet to come"),
    "stop_regex": refused("`stop` takes strings"),
    "thinking_token_budget": refused("thoughts are not told from the rest", -1),
    "repetition_detection": refused("see `repetition_penalty`"),
    "routed_experts_prompt_start": refused("experts are not told", 0),
    "return_routed_experts": refused("experts are not told", False),
    "routed_experts_start_len": refused("experts are not told", 0),
    "return_hidden_states": refused("tokens alone are told", False),
    "kv_transfer_params": refused("of prefill and decode apart"),
    "ec_transfer_params": refused("of prefill and decode apart"),
    "bootstrap_host": refused("of prefill and decode apart"),
    "bootstrap_port": refused("of prefill and decode apart"),
    "bootstrap_room": refused("of prefill and decode apart"),
    "vllm_xargs": refused("of vLLM's plug-ins"),
    "custom_params": refused("of SGLang's plug-ins"),
    "custom_logit_processor": refused("code of a client"),
    "lora_path": refused("one model is served"),
    "session_params": refused("SGLang's sessions"),
    "extra_key": refused("`cache_salt` keeps prefixes apart"),
    "ngram_corpus_id": refused("of speculative decoding"),
    "images_config": refused("text alone is read"),
}

COMPLETION: Mapping[str, Known] = {
    "prompt": honoured("a text, a list of texts, token ids, or lists of them"),
    "logprobs": honoured("0 to 20"),
    "echo": honoured("the prompt before the answer; scored with `logprobs`; `max_tokens` may be 0"),
    "best_of": refused("all that are drawn are told; `n`'s value is fine", 1),
    "suffix": refused("text is written behind a prompt"),
    "prompt_embeds": refused("texts and token ids are read"),
}

CHAT: Mapping[str, Known] = {
    "messages": honoured("system, developer, user, assistant; parts of text"),
    "max_completion_tokens": honoured("as `max_tokens`"),
    "logprobs": honoured("true or false"),
    "top_logprobs": honoured("0 to 20, with `logprobs`"),
    "echo": honoured("the last message before the answer, where it is the assistant's"),
    "chat_template_kwargs": honoured("for the model's template; at most 16,384 characters"),
    "add_generation_prompt": honoured("false: the template does not open the answer"),
    "continue_final_message": honoured("the answer goes on where the last message stops"),
    "reasoning_effort": honoured("for templates that read it; `none`: `enable_thinking` is false"),
    "verbosity": ignored("no template reads it"),
    "metadata": ignored("nothing is stored"),
    "store": ignored("nothing is stored"),
    "service_tier": ignored("see `x-foretoken-sla`"),
    "safety_identifier": ignored("`user` says whose it is"),
    "prompt_cache_key": ignored("prefixes are found by their content"),
    "prompt_cache_options": ignored("prefixes are found by their content"),
    "prompt_cache_retention": ignored("prefixes are found by their content"),
    "parallel_tool_calls": ignored("without `tools` there are none"),
    "prediction": ignored("it would be the same answer, sooner"),
    "separate_reasoning": ignored("all that is said is content"),
    "stream_reasoning": ignored("all that is said is content"),
    "include_reasoning": ignored("all that is said is content"),
    "media_io_kwargs": ignored("text alone is read"),
    "mm_processor_kwargs": ignored("text alone is read"),
    "max_dynamic_patch": ignored("text alone is read"),
    "min_dynamic_patch": ignored("text alone is read"),
    "use_audio_in_video": ignored("text alone is read"),
    "tools": refused("yet to come"),
    "tool_choice": refused("yet to come", "none", "auto"),
    "functions": refused("OpenAI's older word for `tools`"),
    "function_call": refused("OpenAI's older word for `tool_choice`", "none", "auto"),
    "modalities": refused("text alone is written", ["text"]),
    "audio": refused("text alone is written"),
    "web_search_options": refused("nothing is searched"),
    "moderation": refused("nothing is moderated"),
    "documents": refused("put them into a message"),
    "chat_template": refused("the model's own is used"),
    "return_prompt_text": refused("`return_token_ids` gives its tokens", False),
    "return_prompt_token_ids": refused("`return_token_ids` gives them", False),
    "return_meta_info": refused("`usage` is told", False),
    "input_ids": refused("`/v1/completions` takes token ids"),
    "task": refused("of one model's template"),
}

# Of the other endpoint; there clients send them by habit.
IGNORED_IN_COMPLETIONS = frozenset(
    ("metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "verbosity",
     "prompt_cache_options", "prompt_cache_retention", "parallel_tool_calls", "prediction")
)  # fmt: skip
COMPLETION_FIELDS: Mapping[str, Known] = {
    **BOTH,
    **COMPLETION,
    **{name: CHAT[name] for name in CHAT if name in IGNORED_IN_COMPLETIONS},
}
CHAT_FIELDS: Mapping[str, Known] = {**BOTH, **CHAT}

# What SGLang spells otherwise, by its name there.
SPELLED = {"no_stop_trim": "include_stop_str_in_output", "rid": "request_id"}

# Of a chat's message. What is refused may be null or empty.
MESSAGE: Mapping[str, Known] = {
    "role": honoured(""),
    "content": honoured(""),
    "name": ignored("no template reads it"),
    "annotations": ignored(""),
    "refusal": ignored(""),
    "audio": ignored("of an earlier answer"),
    "reasoning": ignored("of an earlier answer"),
    "reasoning_content": ignored("of an earlier answer"),
    "tool_calls": refused("yet to come"),
    "tool_call_id": refused("yet to come"),
    "function_call": refused("yet to come"),
}
