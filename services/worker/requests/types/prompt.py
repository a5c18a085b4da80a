"""A prompt as a gateway sends it, and how to draw its tokens."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.worker.requests.types.scores import SCORES_BYTES, encoded_bytes

MAX_LOGPROBS = 20
MAX_BIAS = 100.0
# Ids that a request may name: each is examined when a batch changes. `allowed_token_ids` have no
# such limit, because they are handled as an array.
MAX_NAMED = 4_096
MAX_BAD_TOKENS, LONGEST_BAD = 1_024, 64  # sequences, and tokens of one: both size a table
MAX_GRAMMAR = 2**20  # characters of a serialized grammar


class SourceText(NamedTuple):
    """What a grammar was compiled from. `kind` is json_schema, regex, choice, grammar or
    structural_tag; `whitespace` of JSON is a regular expression, None the server's default.
    `behind_reasoning`: it applies once the reasoning of the answer has ended."""

    kind: str
    text: str
    whitespace: str | None = None
    behind_reasoning: bool = False


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Resolved sampling parameters: every field has its final value.

    These values turn a parameter off: `top_k=0`, `top_p=1`, `min_p=0`, `repetition_penalty=1`,
    other penalties 0, `logprobs=None`, an empty tuple. `stop_token_ids` end an answer even with
    `ignore_eos`. `logit_bias` holds pairs of an id and the number added to its logit. If
    `allowed_token_ids` has any, no other token is drawn. The last token of a sequence of
    `bad_tokens` is not drawn if the output ends with the tokens before it. `grammar`, as llguidance
    serializes it, is followed by the whole answer. Raises ValueError, naming the field, for a value
    out of range.
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
    prompt_logprobs: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    grammar: str = ""
    source: SourceText | None = None  # of the grammar; None: it cannot be told to other servers

    def __post_init__(self) -> None:
        for field, lowest, highest in _RANGES:
            value = getattr(self, field)
            if not lowest <= value <= highest:  # fails for NaN, too
                raise ValueError(f"{field} must lie in [{lowest:g}, {highest:g}], got {value}")
        for field in ("logprobs", "prompt_logprobs"):
            asked = getattr(self, field)
            if asked is not None and not 0 <= asked <= MAX_LOGPROBS:
                raise ValueError(f"{field} must lie in [0, {MAX_LOGPROBS}], got {asked}")
        if len(self.grammar) > MAX_GRAMMAR:
            raise ValueError(
                f"grammar must have at most {MAX_GRAMMAR} characters, got {len(self.grammar)}"
            )
        self._check_tokens()

    def _check_tokens(self) -> None:
        for field, most in _MOST:
            if len(getattr(self, field)) > most:
                raise ValueError(f"{field} must be at most {most}, got {len(getattr(self, field))}")
        for token, bias in self.logit_bias:
            if not -MAX_BIAS <= bias <= MAX_BIAS:
                raise ValueError(
                    f"logit_bias must lie in [{-MAX_BIAS:g}, {MAX_BIAS:g}], got {bias} of {token}"
                )
        if len({token for token, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias must name each token once")
        if not all(1 <= len(bad) <= LONGEST_BAD for bad in self.bad_tokens):
            raise ValueError(f"bad_tokens must be sequences of 1 to {LONGEST_BAD} tokens")

    @property
    def penalized(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def masked(self) -> bool:
        """Whether some tokens have biases or masks."""
        return bool(self.logit_bias or self.allowed_token_ids or self.bad_tokens)

    def beyond(self, vocab_size: int) -> str:
        """The first field with a token outside the vocabulary; empty without one. O(ids)."""
        for field, ids in self._named():
            if not all(0 <= token < vocab_size for token in ids):
                return field
        return ""

    def _named(self) -> Iterator[tuple[str, Iterable[int]]]:
        yield "stop_token_ids", self.stop_token_ids
        yield "logit_bias", (token for token, _ in self.logit_bias)
        yield "allowed_token_ids", self.allowed_token_ids
        yield "bad_tokens", (token for bad in self.bad_tokens for token in bad)


_RANGES = (
    ("temperature", 0.0, 1e4),
    ("top_p", 1e-9, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-4, 1e4),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)

_MOST = (
    ("stop_token_ids", MAX_NAMED),
    ("logit_bias", MAX_NAMED),
    ("bad_tokens", MAX_BAD_TOKENS),
)

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The first `prompt_tokens` of `token_ids` are the prompt, the rest is output already
    delivered.

    Raises ValueError if the lengths contradict each other.
    """

    request_id: str
    token_ids: Sequence[int]
    prompt_tokens: int
    max_tokens: int
    sampling: SamplingParams = GREEDY
    origin: str = ""  # the gateway stream of the prompt, on which its tokens are sent
    cache_salt: str = ""  # only prompts with the same salt share cached prefixes
    traceparent: str = ""  # of the request's trace; empty: not traced
    adapter: str = ""  # the adapter's name; empty: the base model

    def __post_init__(self) -> None:
        if not 1 <= self.prompt_tokens <= len(self.token_ids):
            raise ValueError(
                f"prompt_tokens must lie in [1, {len(self.token_ids)}], got {self.prompt_tokens}"
            )
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.max_tokens <= self.delivered_tokens:
            raise ValueError(
                f"max_tokens ({self.max_tokens}) must exceed the output already delivered "
                f"({self.delivered_tokens} tokens)"
            )
        asked = self.sampling.prompt_logprobs
        if asked is not None and encoded_bytes(self.prompt_tokens, asked) > SCORES_BYTES:
            most = SCORES_BYTES // encoded_bytes(1, asked)
            raise ValueError(
                f"prompt_logprobs {asked} needs a prompt of at most {most} tokens, got "
                f"{self.prompt_tokens}"
            )

    @property
    def delivered_tokens(self) -> int:
        """Output tokens that were delivered before."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def total_tokens(self) -> int:
        """Prompt and longest output."""
        return self.prompt_tokens + self.max_tokens

    def beyond(self, vocab_size: int) -> str:
        """The first field with a token outside the vocabulary; empty without one. O(ids)."""
        known = min(self.token_ids) >= 0 and max(self.token_ids) < vocab_size
        return self.sampling.beyond(vocab_size) if known else "token_ids"
