"""What a client asks for one prompt, decoded from HTTP or gRPC: not yet checked or tokenized."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypedDict, cast

from gateway.types.constraint import Constraint
from gateway.types.tools import Tool, ToolUse

TOKEN_ID_BYTES = 4
Message = Mapping[str, object]  # role, content (a text), and what else the template reads


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages, the tools that they show, and the options of their chat template."""

    messages: Sequence[Message]
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool | None = None  # None: true unless the last message is continued
    continue_final_message: bool = False
    tools: Sequence[Tool] = ()


TokenIds = list[int]
Prompt = str | TokenIds | Conversation | None  # None: the client gave none


class SamplingFields(TypedDict, total=False):
    """The sampling parameters that a client gave, not yet checked."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    ignore_eos: bool
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int
    prompt_logprobs: int
    n: int
    stop_token_ids: Sequence[int]
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool


def given_fields(values: Mapping[str, object]) -> SamplingFields:
    """The values that are not None; a face's schema has checked their names and types."""
    given = {name: value for name, value in values.items() if value is not None}
    return cast(SamplingFields, given)


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One prompt and everything that applies to it. An empty name means the default."""

    prompt: Prompt = field(repr=False)
    sampling: SamplingFields = field(default_factory=lambda: SamplingFields())
    model: str = ""
    sla_class: str = ""
    sla_budgets: Mapping[str, float] = field(default_factory=dict)  # explicit, in seconds
    application: str = ""
    cache_salt: str = field(default="", repr=False)  # requests with one salt share prefixes
    user: str = field(default="", repr=False)
    include_forecast: bool = False  # the client receives forecasts of each choice
    add_special_tokens: bool | None = None  # None: true for a text, false for a conversation
    truncate_prompt_tokens: int | None = None  # keep the last; -1: as many as fit; None: all
    priority: int = 0  # lower runs first
    request_id: str = ""  # the client's name for it
    constraint: Constraint | None = None  # what the answer must follow
    tools: ToolUse | None = None  # calls that the answer may or must have
    separates_reasoning: bool = False  # reasoning is read apart from the content
    adapter: str = ""  # the LoRA adapter that `model` names; empty: the base model
    reasoning_tokens: int | None = None  # the most tokens of reasoning; None: no limit
    limits_known_reasoning: bool = False  # the limit has no effect if reasoning has no marks

    @property
    def choices(self) -> int:
        return max(1, self.sampling.get("n", 1))

    @property
    def scores_only(self) -> bool:
        """Whether the client wants scores of the prompt and no answer; one token is generated and
        discarded."""
        return self.sampling.get("max_tokens") == 0 and "prompt_logprobs" in self.sampling


def text_of(message: Message) -> str:
    """The content of a message."""
    return cast(str, message["content"])


def count_prompt_bytes(prompt: Prompt) -> int:
    """Bytes to tokenize, without blanks around messages, which chat templates strip, and without
    tools and calls."""
    match prompt:
        case None:
            return 0
        case str():
            return len(prompt.encode())
        case Conversation():
            return sum(len(text_of(message).strip().encode()) for message in prompt.messages)
        case _:
            return TOKEN_ID_BYTES * len(prompt)


def count_tool_bytes(prompt: Prompt) -> int:
    """Bytes to tokenize of tools and calls, about: a template may leave some out."""
    if not isinstance(prompt, Conversation):
        return 0
    calls = [call for message in prompt.messages if (call := message.get("tool_calls"))]
    counted = len(json.dumps(calls)) if calls else 0
    return counted + sum(tool.size_bytes for tool in prompt.tools)
