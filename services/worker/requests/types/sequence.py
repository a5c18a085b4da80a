"""Sequence: one request at a worker, from its admission to its end."""

from dataclasses import dataclass, field
from enum import Enum

from services.core import FinishReason, HeldRequest, RequestProgress
from services.worker.requests.types.grammar import GrammarMatcher
from services.worker.requests.types.lookup import PromptLookup
from services.worker.requests.types.prompt import Prompt
from services.worker.requests.types.scores import Opening, PromptLogprobs

UNKNOWN = -1  # a token that a step in flight is drawing


class SequencePhase(Enum):
    """Only RUNNING sequences are composed. RUNNING and PAUSED ones hold device blocks."""

    RUNNING = "running"
    PAUSED = "paused"  # keeps its KV, or gets it back, until admitted again
    PARKED = "parked"  # its KV is in host memory, or is recomputed later


@dataclass(slots=True, eq=False)
class Sequence:
    """A request at the worker. `tokens` are prompt and output.

    Either the KV of the first `computed` tokens is in the device's cache, or that of the first
    `host_tokens` tokens is in host memory. During an upload, `upload_serial` is the serial of the
    move, and `host_tokens` is unchanged.

    While a step in flight draws the next token, the last token, and only that, is UNKNOWN: it
    counts for the length, and nothing may depend on its value.

    If the prompt is scored, no cached KV is used, and `scores` are those of the first `computed`
    tokens; they are sent with the first drawn token.
    """

    prompt: Prompt
    tokens: list[int]
    request_id: str
    prompt_tokens: int
    max_length: int  # longest prompt and output
    min_length: int  # end-of-sequence tokens do not count before this length
    limit_length: int  # the plan's budget, as a length
    ends_on_eos: bool
    stop_ids: frozenset[int]
    computed: int = 0
    host_tokens: int = 0
    upload_serial: int = 0
    serial: int = 0  # order of admission
    keys: list[bytes] = field(default_factory=list)  # of its first full blocks
    published: int = 0  # number of its blocks that are published, or need not be
    exact: bool = True  # its KV was never quantized
    phase: SequencePhase = SequencePhase.RUNNING
    ended: FinishReason | None = None  # ended, but computed on with its static batch
    unsent: int = 0  # tokens not sent yet: the last valid one, and invalid ones after it
    # The row of the step in flight that draws the last token; -1: the token is known.
    sampling_row: int = -1
    scores: PromptLogprobs | None = None  # until they are sent
    cached: int | None = None  # prompt tokens found at the first lookup in the prefix cache
    opened: bool = False  # whether it has drawn a token since it arrived
    lookup: PromptLookup | None = None  # once a draft was looked for
    constrained: bool = False  # its answer follows a grammar
    matcher: GrammarMatcher | None = None  # once a mask of its grammar was needed
    adapter_slot: int = -1  # of its adapter, in the step being composed; -1: it has none

    @classmethod
    def start(cls, prompt: Prompt, limit_tokens: int) -> "Sequence":
        return cls(
            prompt=prompt,
            tokens=list(prompt.token_ids),
            request_id=prompt.request_id,
            prompt_tokens=prompt.prompt_tokens,
            max_length=prompt.total_tokens,
            min_length=prompt.prompt_tokens + prompt.sampling.min_tokens,
            limit_length=prompt.prompt_tokens + limit_tokens,
            # The end is drawn only where the grammar is complete; nothing can follow it.
            ends_on_eos=not prompt.sampling.ignore_eos or bool(prompt.sampling.grammar),
            stop_ids=frozenset(prompt.sampling.stop_token_ids),
            scores=_room(prompt),
            constrained=bool(prompt.sampling.grammar),
        )

    def advance(self, row: int) -> bool:
        """Continues as if the next token were known, which this row of a step draws. Returns
        whether its budget and length allow another one after it."""
        self.computed = length = len(self.tokens)
        self.tokens.append(UNKNOWN)
        self.sampling_row = row
        return length + 1 < self.limit_length and length + 1 < self.max_length

    def set_drawn(self, token: int) -> int:
        """Stores the drawn token; returns the length."""
        self.tokens[-1] = token
        self.sampling_row = -1
        return len(self.tokens)

    def undo_advance(self) -> None:
        """Undoes `advance`: nothing was drawn."""
        self.tokens.pop()
        self.sampling_row = -1

    def finish_reason(self, token: int, eos_ids: frozenset[int]) -> FinishReason | None:
        """The reason for which the newest token ends the sequence; None if it continues. Before
        `min_length` an end of sequence is drawn only if a grammar allows nothing else, and then
        it counts."""
        length = len(self.tokens)
        ends = token in self.stop_ids or (token in eos_ids and self.ends_on_eos)
        if ends and (length > self.min_length or (self.constrained and token in eos_ids)):
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_length else None

    def open(self) -> Opening:
        """The opening that is sent with the first drawn token; called once."""
        self.opened = True
        opening, self.scores = Opening(self.cached or 0, self.scores), None
        return opening

    @property
    def output_tokens(self) -> int:
        """Known output tokens."""
        return len(self.tokens) - self.prompt_tokens - self.unsent - (self.sampling_row >= 0)

    @property
    def within_budget(self) -> bool:
        """Whether budget and length allow another token."""
        length = len(self.tokens)
        return length < self.limit_length and length < self.max_length

    @property
    def waits(self) -> bool:
        """Whether the sequence continues only when its last token is known. A decode row reads that
        on the device; evicted KV is recomputed or uploaded for known tokens."""
        return self.sampling_row >= 0 and not self.is_decode

    @property
    def held_tokens(self) -> int:
        """Tokens with KV in either pool."""
        return self.computed or self.host_tokens

    @property
    def is_decode(self) -> bool:
        """Whether all tokens but the newest are in the cache. A sequence without KV is a prefill
        even with a single token: it must not evict older sequences for its first block."""
        return 0 < self.computed == len(self.tokens) - 1

    @property
    def reported_tokens(self) -> int:
        """Held tokens as reported to the scheduler, without the newest known token."""
        return min(self.held_tokens, self.prompt_tokens + self.output_tokens + self.unsent - 1)

    def progress(self, blocks: int) -> RequestProgress:
        """The progress to report, with this many device blocks: `output_tokens` and
        `reported_tokens`, without a call for each because a report has many requests."""
        known = len(self.tokens) - (self.sampling_row >= 0)
        held_tokens = self.computed or self.host_tokens
        return RequestProgress(
            self.request_id,
            known - self.prompt_tokens - self.unsent,
            held_tokens if held_tokens < known else known - 1,
            blocks,
        )

    def held(self, blocks: int) -> HeldRequest:
        """Everything that a scheduler needs to adopt the request."""
        return HeldRequest(
            self.request_id,
            self.prompt_tokens,
            self.max_length - self.prompt_tokens,
            self.output_tokens,
            self.reported_tokens,
            self.limit_length - self.prompt_tokens,
            self.phase is SequencePhase.RUNNING,
            blocks,
        )


def _room(prompt: Prompt) -> PromptLogprobs | None:
    """Empty scores for a prompt to score. A request with output has received its scores before."""
    asked = prompt.sampling.prompt_logprobs
    if asked is None or len(prompt.token_ids) > prompt.prompt_tokens:
        return None
    return PromptLogprobs.room(prompt.prompt_tokens - 1, asked)
