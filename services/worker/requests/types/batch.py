"""StepBatch: the computation of one engine iteration, as plain numpy arrays."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.core import FinishReason
from services.costs import StepTiming, SwapTiming
from services.worker.requests.types.scores import Opening
from services.worker.requests.types.sequence import Sequence

Ints = NDArray[np.int64]

NO_INTS = np.zeros(0, np.int64)


@dataclass(slots=True)
class PrefillChunk:
    """Tokens [start, end) of a sequence that a step prefills: prompt, or output to recompute. With
    `drafts`, it is a decode instead: the newest token, and the drafted ones that may follow it."""

    sequence: Sequence
    start: int
    end: int
    table: Ints  # blocks that hold [0, end)
    drafts: tuple[int, ...] = ()
    # Whether the chunk ends at the newest token, so that the next one is drawn. `tokens` may have a
    # placeholder for that one before the commit.
    samples: bool = field(init=False)
    # The number of the chunk's first tokens with logits that score the prompt's next token.
    scored: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.samples = self.end - len(self.drafts) == len(self.sequence.tokens)
        if self.sequence.scores is not None:
            self.scored = max(0, min(self.end, self.sequence.prompt_tokens - 1) - self.start)

    @property
    def tokens(self) -> int:
        return self.end - self.start

    @property
    def known_end(self) -> int:
        """The end of the tokens that are not drafted."""
        return self.end - len(self.drafts)


class DecodeRows:
    """The decoding half of a batch: one token per row, in falling order of context length.

    The arrays are kept between steps: while the same sequences decode, `advance` increments them.
    `tables` is padded with block 0, which masks hide. `fed` is None if `tokens` has the input of
    every row. While a step is in flight, `fed` is the row of that step that draws the input, or -1
    if `tokens` has it. `tokens`, `tables` and `slots` are built when they are first read: only a
    device needs them.
    """

    def __init__(self, sequences: Seq[Sequence], tables: Seq[Seq[int]], block_tokens: int):
        computed = np.array([s.computed for s in sequences], np.int64)
        order = (-computed).argsort(kind="stable")
        places = order.tolist()
        self.sequences = [sequences[i] for i in places]
        self.block_tokens = block_tokens
        fed = [s.sampling_row for s in self.sequences]
        self.fed = np.array(fed, np.int64) if max(fed, default=-1) >= 0 else None
        self.positions: Ints = computed[order]
        self._blocks = [tables[i] for i in places]
        self._each = np.arange(len(places))
        self.version = 0  # incremented whenever `tables` changes

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def tokens(self) -> Ints:
        """The input of each row."""
        return np.array([s.tokens[-1] for s in self.sequences], np.int64)

    @cached_property
    def tables(self) -> Ints:
        """The blocks of each row, (rows, blocks)."""
        width = max((len(blocks) for blocks in self._blocks), default=0)
        # Spare columns, so that a further block rarely needs a new array.
        tables = np.zeros((len(self), width + 8), np.int64)
        for row, blocks in enumerate(self._blocks):
            tables[row, : len(blocks)] = blocks
        return tables

    @cached_property
    def slots(self) -> Ints:
        """The position in the cache at which each row's input is stored."""
        if not self.sequences:
            return NO_INTS
        blocks = self.tables[np.arange(len(self)), self.positions // self.block_tokens]
        slots: Ints = blocks * self.block_tokens + self.positions % self.block_tokens
        return slots

    def advance(self) -> Ints:
        """Advances each row to its drawn token; returns the rows that now need another block."""
        self.slots += 1
        self.fed = self._each
        self.positions += 1
        return np.flatnonzero(self.positions % self.block_tokens == 0)

    def skip(self, steps: int) -> None:
        """Advances each row by this many steps with known tokens. Its sequence has them and their
        blocks, except for the block of the next one."""
        self.positions += steps
        self.fed = None
        for built in ("tokens", "tables", "slots"):
            self.__dict__.pop(built, None)
        self.version += 1

    def set_drawn(self, drawn: Seq[int]) -> None:
        """Stores the tokens that the rows drew in the step before the last `advance`."""
        self.tokens[:] = drawn
        self.fed = None

    def set_block(self, row: int, block: int) -> None:
        """Sets the block at the row's current position."""
        self.version += 1
        if "slots" not in self.__dict__:  # built from the row's blocks, which have it
            self.__dict__.pop("tables", None)
            return
        index = int(self.positions[row]) // self.block_tokens
        if index >= self.tables.shape[1]:
            wider = np.zeros((len(self), 2 * self.tables.shape[1]), np.int64)
            wider[:, : self.tables.shape[1]] = self.tables
            self.tables = wider
        self.tables[row, index] = block
        self.slots[row] = block * self.block_tokens


@dataclass(slots=True)
class StepBatch:
    """Decode rows first, then decodes with drafts, then prefill chunks in order of admission.

    `sampling` are the sequences that draw a token, in the order of the rows of logits: all decode
    rows, then the chunks that complete their sequence. The rows of drafted tokens follow, then
    those that score a prompt, both chunk by chunk.
    """

    decodes: DecodeRows
    chunks: list[PrefillChunk]

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences of the batch, including padding."""
        return [*self.decodes.sequences, *(chunk.sequence for chunk in self.chunks)]

    @property
    def sampling(self) -> list[Sequence]:
        if not self.chunks:
            return self.decodes.sequences
        return self.decodes.sequences + [c.sequence for c in self.chunks if c.samples]

    @property
    def constrained(self) -> bool:
        """Whether a drawn token must follow a grammar. O(rows)."""
        return any(sequence.constrained for sequence in self.sampling)

    @property
    def drafted(self) -> list[PrefillChunk]:
        """Decodes with drafts."""
        return [chunk for chunk in self.chunks if chunk.drafts]

    @property
    def draws(self) -> tuple[list[Sequence], Ints | None]:
        """The sequence of each row that draws, and how many drafted tokens precede the draw; None
        without drafts."""
        drafted = self.drafted
        if not drafted:
            return self.sampling, None
        sampling = self.sampling
        behind = [chunk.sequence for chunk in drafted for _ in chunk.drafts]
        ahead = [np.arange(1, len(chunk.drafts) + 1) for chunk in drafted]
        return sampling + behind, np.concatenate([np.zeros(len(sampling), np.int64), *ahead])

    @property
    def decoding(self) -> int:
        """Number of sequences that decode, with or without a draft."""
        return len(self.decodes) + sum(1 for chunk in self.chunks if chunk.drafts)

    @property
    def scored(self) -> list[PrefillChunk]:
        """Chunks that score some of their prompt's tokens."""
        return [chunk for chunk in self.chunks if chunk.scored]

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.chunks if not chunk.drafts)

    @property
    def context_tokens(self) -> int:
        """Cached tokens that this step's attention reads."""
        return int(self.decodes.positions.sum()) + sum(chunk.end for chunk in self.chunks)


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities of the raw distribution: of the drawn token, and of the most likely
    ones."""

    chosen: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class NewToken(NamedTuple):
    """One drawn token. `offset` counts the request's output tokens from 0; `origin` is the
    prompt's. The first token since the request arrived has an `opening`."""

    origin: str
    request_id: str
    offset: int
    token_id: int
    finish: FinishReason | None
    logprobs: TokenLogprobs | None
    opening: Opening | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step: tokens in batch order, at most one per sequence, then those behind
    accepted drafts, in order of offset. `timings` are those known by now: on a CPU the step's, on a
    GPU of earlier steps. `swaps` are copies completed since the previous step. `failed` are
    requests that the step ended with an error, and a sentence for each."""

    tokens: list[NewToken]
    timings: list[StepTiming]
    swaps: Seq[SwapTiming] = ()
    failed: Seq[tuple[Sequence, str]] = ()
