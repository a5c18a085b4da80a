"""What a gateway sends a worker: a prompt and how to draw its tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn, resolved: every field has its final value.

    Off is `top_k=0`, `top_p=1`, `min_p=0`, `repetition_penalty=1`, other penalties 0,
    `logprobs=None`. Raises ValueError, naming the field, for a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    min_tokens: int = 0
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for field, lowest, highest in _RANGES:
            value = getattr(self, field)
            if not lowest <= value <= highest:  # a NaN fails as well
                raise ValueError(f"{field} must lie in [{lowest:g}, {highest:g}], got {value}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise ValueError(f"logprobs must lie in [0, {MAX_LOGPROBS}], got {self.logprobs}")

    @property
    def penalized(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


_RANGES = (
    ("temperature", 0.0, 1e4),
    ("top_p", 1e-9, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-4, 1e4),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The first `prompt_tokens` of `token_ids` are the prompt, the rest output already delivered.

    Raises ValueError where the lengths contradict each other.
    """

    request_id: str
    token_ids: Sequence[int]
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams = GREEDY
    origin: str = ""  # the gateway stream it came on, which its tokens go to
    cache_salt: str = ""  # only prompts of the same salt share cached prefixes

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens <= len(self.token_ids):
            raise ValueError(
                f"prompt_tokens must lie in [1, {len(self.token_ids)}], got {self.prompt_tokens}"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.max_tokens <= len(self.token_ids) - self.prompt_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must exceed the output already delivered "
                f"({len(self.token_ids) - self.prompt_tokens} tokens)"
            )

    @property
    def total_tokens(self) -> int:
        """Prompt and output at its longest."""
        return self.prompt_tokens + self.max_tokens
