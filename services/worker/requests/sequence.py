"""Sequence: one request at a worker, from its admission to its end."""

from dataclasses import dataclass, field
from enum import Enum

from services.core import FinishReason, HeldRequest, RequestProgress
from services.worker.requests.prompt import Prompt
from services.worker.requests.scores import Opening, PromptLogprobs

UNKNOWN = -1  # a token that a step in flight is drawing


class Phase(Enum):
    """Only RUNNING ones are composed. Blocks of the device are held in RUNNING and PAUSED."""

    RUNNING = "running"
    PAUSED = "paused"  # keeps its KV, or gets it back, until admitted again
    PARKED = "parked"  # its KV rests in host memory, or is to be computed again


@dataclass(slots=True, eq=False)
class Sequence:
    """`tokens` are prompt and output; the KV of the first `computed` of them is in the cache.

    Or it rests in host memory, of the first `resting` of them: never both. While it is on its
    way back, `arriving` is that move's serial, and it rests still.

    While a step that it draws in is in flight, its last token is UNKNOWN, and only that: it has its
    place and its length, and nothing may depend on its value.

    Where its prompt is to be scored, all KV of that is computed here, chunk by chunk, and `scores`
    are those of the first `computed` tokens; they are told with the first token that it draws.
    """

    prompt: Prompt
    tokens: list[int]
    request_id: str
    prompt_tokens: int
    max_length: int  # prompt and output at their longest
    min_length: int  # no end of sequence counts before this many tokens
    limit_length: int  # the plan's budget, as a length
    ends_on_eos: bool
    stop_ids: frozenset[int]
    computed: int = 0
    resting: int = 0
    arriving: int = 0
    serial: int = 0  # order of admission
    keys: list[bytes] = field(default_factory=list)  # of its first full blocks
    published: int = 0  # how many of its blocks are, or need not be
    exact: bool = True  # its KV is as the model computed it, not quantized on the way
    phase: Phase = Phase.RUNNING
    ended: FinishReason | None = None  # but its static batch goes on, and it with it
    untold: int = 0  # tokens at its end: then the last, and the invalid ones behind it
    drawing: int = -1  # the row of the step in flight that draws its last token; -1: that is known
    scores: PromptLogprobs | None = None  # until they are told
    cached: int | None = None  # prompt tokens found when it was looked for them first
    opened: bool = False  # it has drawn a token since it came

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
            ends_on_eos=not prompt.sampling.ignore_eos,
            stop_ids=frozenset(prompt.sampling.stop_token_ids),
            scores=_room(prompt),
        )

    def advance(self, row: int) -> bool:
        """This row of a step draws its next token: go on as if that were known. Whether it may get
        another behind it."""
        self.computed = length = len(self.tokens)
        self.tokens.append(UNKNOWN)
        self.drawing = row
        return length + 1 < self.limit_length and length + 1 < self.max_length

    def learn(self, token: int) -> int:
        """What was drawn; returns the length."""
        self.tokens[-1] = token
        self.drawing = -1
        return len(self.tokens)

    def unlearn(self) -> None:
        """Nothing was drawn after all."""
        self.tokens.pop()
        self.drawing = -1

    def finish_of(self, token: int, eos_ids: frozenset[int]) -> FinishReason | None:
        """How it ends by this token, its newest; None if it goes on."""
        length = len(self.tokens)
        ends = token in self.stop_ids or (token in eos_ids and self.ends_on_eos)
        if ends and length > self.min_length:
            return FinishReason.STOP
        return FinishReason.LENGTH if length >= self.max_length else None

    def open(self) -> Opening:
        """It has drawn its first token: what is told with that, once."""
        self.opened = True
        opening, self.scores = Opening(self.cached or 0, self.scores), None
        return opening

    @property
    def output_tokens(self) -> int:
        """Those that are known."""
        return len(self.tokens) - self.prompt_tokens - self.untold - (self.drawing >= 0)

    @property
    def within_budget(self) -> bool:
        """Whether it may get a token more: it would end by its length before it is told so."""
        length = len(self.tokens)
        return length < self.limit_length and length < self.max_length

    @property
    def waits(self) -> bool:
        """It can go on only once its last token is known. As a decode row it reads that on the
        device; what was evicted or rests is computed, or brought back, from known tokens."""
        return self.drawing >= 0 and not self.is_decode

    @property
    def held_tokens(self) -> int:
        """Tokens whose KV is kept, wherever."""
        return self.computed or self.resting

    @property
    def is_decode(self) -> bool:
        """All but its newest token is in the cache. One that has nothing there is a prefill, be
        it of a single token: it must not evict its elders for its first block."""
        return 0 < self.computed == len(self.tokens) - 1

    @property
    def told_tokens(self) -> int:
        """Of those, what a scheduler is told: never the newest token that it knows of."""
        return min(self.held_tokens, self.prompt_tokens + self.output_tokens + self.untold - 1)

    def progress(self, blocks: int) -> RequestProgress:
        """How far it is; it has so many blocks of the device."""
        return RequestProgress(self.request_id, self.output_tokens, self.told_tokens, blocks)

    def held(self, blocks: int) -> HeldRequest:
        """All that a scheduler which never heard of it has to know."""
        return HeldRequest(
            self.request_id,
            self.prompt_tokens,
            self.max_length - self.prompt_tokens,
            self.output_tokens,
            self.told_tokens,
            self.limit_length - self.prompt_tokens,
            self.phase is Phase.RUNNING,
            blocks,
        )


def _room(prompt: Prompt) -> PromptLogprobs | None:
    """For the scores of its prompt. One that has output already was told them."""
    asked = prompt.sampling.prompt_logprobs
    if asked is None or len(prompt.token_ids) > prompt.prompt_tokens:
        return None
    return PromptLogprobs.room(prompt.prompt_tokens - 1, asked)
