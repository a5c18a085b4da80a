"""`GenerationRequest`: one checked and resolved prompt, the request type of the whole gateway."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from gateway.types.answer_parts import AnswerReader
from gateway.types.client_request import ClientRequest
from gateway.types.constraint import Constraint
from services.core import Sla
from services.runtime.prefix import owned_salt

SEED_SPAN = 2**64  # seeds are int64


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters: every field has a value, including the seed."""

    seed: int
    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logprobs: int | None = None
    n: int = 1
    stop_token_ids: frozenset[int] = frozenset()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_tokens: Sequence[Sequence[int]] = ()  # never the last token after the others
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    grammar: str = field(default="", repr=False)  # serialized by llguidance; empty: none
    constraint: Constraint | None = None  # that was compiled to the grammar
    grammar_tokens: int = 0  # of the shortest answer that follows the grammar, without the end

    @property
    def least_tokens(self) -> int:
        """The fewest output tokens of an answer, with its end. A grammar comes before `min_tokens`,
        and a stop string or token of the request may end an answer before its grammar does."""
        least = self.min_tokens
        if self.grammar:
            least = 0 if self.stop or self.stop_token_ids else self.grammar_tokens
        return min(least + 1, self.max_tokens)

    def choice_seed(self, choice: int) -> int:
        """The seed of one choice: consecutive choices have consecutive seeds, wrapped to int64."""
        half = SEED_SPAN // 2
        return (self.seed + choice + half) % SEED_SPAN - half


@dataclass(frozen=True, slots=True)
class ReasoningLimit:
    """The most tokens of an answer up to the end of its reasoning, and what ends it."""

    tokens: int
    start: str
    end: str
    end_ids: Sequence[int]  # the tokens of `end`
    opened: bool  # the answer begins within the reasoning; else with `start`, if at all


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to answer, checked and resolved."""

    client: ClientRequest  # without its prompt, which `prompt_ids` replace
    prompt_ids: Sequence[int] = field(repr=False)
    sampling: Sampling
    sla: Sla
    arrival_s: float
    deadline_s: float = inf
    instruction: str = field(default="", repr=False)
    user_input: str = field(default="", repr=False)
    answer_tokens: tuple[int, ...] = ()  # of the conversation's earlier answers, approximate
    traceparent: str = ""  # empty: not traced
    reasoning_limit: ReasoningLimit | None = None
    prefix_owner: str = ""  # the API key that cached prefixes belong to; empty: common to all
    key_name: str = ""  # of its API key; empty: none
    weight: float = 0.0  # of its API key, which is a tenant then; 0: none
    # Opens the reader of one choice; None: its text is content as it is.
    open_reader: Callable[[], AnswerReader] | None = field(default=None, repr=False)

    @property
    def tenant(self) -> str:
        """The tenant for fair sharing: a key with a weight, else the salt, else the user."""
        own = self.key_name if self.weight else ""
        return own or self.client.cache_salt or self.client.user

    @property
    def prefix_salt(self) -> str:
        """Requests with the same salt share cached prefixes: the client's salt, within its owner's
        prefixes. A client cannot name a salt of another owner."""
        return owned_salt(self.prefix_owner, self.client.cache_salt)

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    def tokens_needed(self, choice: int, output_tokens: int) -> int:
        """Tokens of a choice with so much output, at most `max_tokens`: the first has the prompt,
        too."""
        prompt = self.prompt_tokens if choice == 0 else 0
        return prompt + min(output_tokens, self.sampling.max_tokens)


@dataclass(frozen=True, slots=True)
class RequestArrival:
    """Arrival time and timeout of a request, and its SLA class as far as known on arrival."""

    arrival_s: float
    timeout_s: float = inf
    sla_class: str = ""  # as the client named it; empty: the default

    @property
    def deadline_s(self) -> float:
        return self.arrival_s + self.timeout_s


@dataclass(frozen=True, slots=True)
class ContextLimit:
    """The longest prompt and answer that some worker can hold, and what sets that limit."""

    tokens: int
    bound: str
