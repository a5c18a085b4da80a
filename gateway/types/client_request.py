"""What a client asks for one prompt, decoded from HTTP or gRPC: not yet checked or tokenized."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

TOKEN_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class Conversation:
    """Chat messages (role and content), and the options of their chat template."""

    messages: Sequence[Mapping[str, str]]
    template_kwargs: Mapping[str, object] = field(default_factory=dict)
    add_generation_prompt: bool | None = None  # None: true unless the last message is continued
    continue_final_message: bool = False


TokenIds = list[int]
Prompt = str | TokenIds | Conversation | None  # None: the client gave none


GivenSampling = Mapping[str, Any]  # fields of `Sampling` that the client gave, not yet checked


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One prompt and everything that applies to it. An empty name means the default."""

    prompt: Prompt = field(repr=False)
    sampling: GivenSampling = field(default_factory=dict)
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

    @property
    def choices(self) -> int:
        return max(1, int(self.sampling.get("n", 1)))

    @property
    def scores_only(self) -> bool:
        """Whether the client wants scores of the prompt and no answer; one token is generated and
        discarded."""
        return self.sampling.get("max_tokens") == 0 and "prompt_logprobs" in self.sampling


def count_prompt_bytes(prompt: Prompt) -> int:
    """Bytes to tokenize, without blanks around messages, which chat templates strip."""
    match prompt:
        case None:
            return 0
        case str():
            return len(prompt.encode())
        case Conversation():
            return sum(len(m["content"].strip().encode()) for m in prompt.messages)
        case _:
            return TOKEN_ID_BYTES * len(prompt)
