"""DrawPlan: the sampling parameters of a batch as tensors, rebuilt when the batch changes.

The plan of a row depends only on the parameters of that row. While the same sequences draw, a step
builds no tensors and copies nothing to the device: positions advance there.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine.sampling.drawn import LogprobRows, Rows
from services.worker.engine.sampling.seen_tokens import SeenTokens
from services.worker.engine.sampling.token_masks import Mask, build_masks
from services.worker.kernels.interface import Filters, SamplingKernels
from services.worker.kernels.reference.sampling import draw, stream_keys, uniforms
from services.worker.kv.device_streams import to_device
from services.worker.requests.types.batch import Ints
from services.worker.requests.types.prompt import SamplingParams
from services.worker.requests.types.sequence import Sequence

NO_TOP_K = 2**31 - 1
NO_TOP_P = 2.0  # above every sum of probabilities, which may slightly exceed 1
ALL_BITS = 2**64 - 1
NUMBERS_AHEAD = 32  # random numbers generated at once per row: the cost is the same as for one
NOTHING = torch.zeros(0)
# Columns of a row's parameters.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)

Numbers = NDArray[np.float64]
RowMask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Penalized:
    """The rows of a batch with penalties. `seen` are their rows in SeenTokens; the parameters are
    columns [rows, 1]."""

    rows: Rows
    seen: Ints
    seen_index: Tensor  # `seen` on the device
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def change(self, logits: Tensor, ids: Tensor, times: Tensor) -> None:
        """Penalizes the logits of seen tokens in place. Repetition counts prompt and output (Keskar
        et al., "CTRL", 2019, §4.1), presence and frequency only output."""
        selected = self.rows.select(logits)
        x = selected.gather(-1, ids)
        # Exact, because one of the two terms is 0; a conditional is slower.
        x = x.clamp(min=0) / self.repetition + x.clamp(max=0) * self.repetition
        x = x - self.presence * times.clamp(max=1) - self.frequency * times
        selected.scatter_(-1, ids, x)
        if self.rows.index is not None:
            logits.index_copy_(0, self.rows.index, selected)


@dataclass(frozen=True, slots=True)
class Random:
    """Rows with the same kind of random draw. They draw among all tokens if `filters` is None."""

    rows: Rows
    temperature: Tensor | None  # [rows, 1]; None if all are 1
    filters: Filters | None

    def draw(self, logits: Tensor, uniform: Tensor, kernels: SamplingKernels) -> Tensor:
        """Draws a token for each of these rows, from the batch's `logits` and `uniform` numbers."""
        logits = self.rows.select(logits)
        if self.temperature is not None:
            logits = logits / self.temperature
        probs = logits.softmax(-1)
        if self.filters is None:
            return draw(probs, self.rows.select(uniform))
        return kernels.sample_filtered(probs, self.filters, self.rows.select(uniform))


@dataclass(slots=True)
class DrawPlan:
    """How a batch draws. `lengths`, on the host, are the numbers of tokens of the sequences.
    `positions` [rows] are the output positions of the tokens to draw, and `keys` [rows] the
    generator's keys. `numbers` [NUMBERS_AHEAD, rows] are random numbers, of which `taken` are
    used."""

    sequences: list[Sequence]
    lengths: Ints
    positions: Tensor
    keys: Tensor
    greedy: bool  # some rows are greedy
    random: list[Random]
    penalized: Penalized | None
    masks: list[Mask]
    logprob_rows: LogprobRows | None
    numbers: Tensor = NOTHING
    taken: int = NUMBERS_AHEAD

    def suits(self, sequences: list[Sequence], lengths: Ints) -> bool:
        """Whether these sequences, with these lengths, continue from this plan."""
        return self.sequences == sequences and bool((self.lengths == lengths).all())

    def uniform(self) -> Tensor:
        """A number in [0, 1) for each row's next token."""
        if self.taken == NUMBERS_AHEAD:
            steps = torch.arange(NUMBERS_AHEAD, device=self.positions.device)[:, None]
            self.numbers, self.taken = uniforms(self.keys, self.positions + steps), 0
        self.taken += 1
        return self.numbers[self.taken - 1]

    def advance(self, drawn: Tensor) -> None:
        """Advances past the tokens just `drawn`."""
        for mask in self.masks:
            mask.advance(drawn)
        self.positions.add_(1)
        self.lengths += 1


@dataclass(frozen=True, slots=True)
class Parameters:
    """What does not change of sequences: their numbers by column, top_k, the generator's keys, and
    tokens of their prompts; `rows` are their places in these."""

    rows: dict[Sequence, int]
    numbers: Numbers
    top_k: Ints
    keys: Tensor
    prompts: Ints

    @classmethod
    def of(cls, sequences: list[Sequence], tensor: Callable[[Ints], Tensor]) -> "Parameters":
        """`tensor` copies to the device, where the keys are: they are never read on the host."""
        samplings = [sequence.prompt.sampling for sequence in sequences]
        seeds = np.array([s.seed & ALL_BITS for s in samplings], np.uint64).view(np.int64)
        return cls(
            {sequence: row for row, sequence in enumerate(sequences)},
            np.array([_numbers(s) for s in samplings]),
            np.array([s.top_k or NO_TOP_K for s in samplings], np.int64),
            stream_keys(tensor(seeds)),
            np.array([sequence.prompt_tokens for sequence in sequences], np.int64),
        )


class Planner:
    """Makes draw plans. O(rows) each."""

    def __init__(self, device: torch.device, eos_ids: Iterable[int], seen: SeenTokens):
        self._device = device
        self._eos = tuple(eos_ids)
        self._seen = seen
        self._parameters = Parameters.of([], self._tensor)

    def clear(self) -> None:
        """Drops all sequences."""
        self._parameters = Parameters.of([], self._tensor)

    def plan(self, sequences: list[Sequence], lengths: Ints, newest: Tensor) -> DrawPlan:
        """The plan of a batch. `newest` are the tokens of the last step. Raises ValueError if a
        penalty or a bad word depends on a token that is neither known nor drawn here."""
        samplings = [sequence.prompt.sampling for sequence in sequences]
        rows = self._find_rows(sequences)
        numbers = self._parameters.numbers[rows]
        return DrawPlan(
            sequences=list(sequences),
            lengths=lengths,
            positions=self._tensor(lengths - self._parameters.prompts[rows]),
            keys=self._parameters.keys[self._tensor(rows)],
            greedy=bool((numbers[:, TEMPERATURE] == 0).any()),
            random=self._random(numbers, self._parameters.top_k[rows]),
            penalized=self._penalized(sequences, numbers),
            masks=build_masks(sequences, self._eos, newest, self._tensor),
            logprob_rows=self._logprob_rows(samplings),
        )

    def _find_rows(self, sequences: list[Sequence]) -> Ints:
        """The rows of these sequences in the table of parameters. It is made anew if one is
        missing: with drafts, a batch has the same sequences in another order at each step."""
        known = self._parameters.rows
        if any(sequence not in known for sequence in sequences):
            self._parameters = Parameters.of(list(dict.fromkeys(sequences)), self._tensor)
            known = self._parameters.rows
        return np.array([known[sequence] for sequence in sequences], np.int64)

    def _random(self, numbers: Numbers, top_k: Ints) -> list[Random]:
        """Rows with top_k form a group of their own, because fewer of their tokens are examined."""
        random = numbers[:, TEMPERATURE] > 0
        limited = top_k < NO_TOP_K
        filtered = limited | (numbers[:, TOP_P] < 1) | (numbers[:, MIN_P] > 0)
        groups = (
            (random & ~filtered, False),
            (random & limited, True),
            (random & filtered & ~limited, True),
        )
        return [
            Random(
                self._rows(rows),
                self._temperatures(numbers[rows, TEMPERATURE].astype(np.float32)),
                self._filters(numbers[rows], top_k[rows]) if is_filtered else None,
            )
            for rows, is_filtered in groups
            if rows.any()
        ]

    def _temperatures(self, temperatures: NDArray[np.float32]) -> Tensor | None:
        return None if (temperatures == 1).all() else self._tensor(temperatures[:, None])

    def _filters(self, numbers: Numbers, top_k: Ints) -> Filters:
        widest = int(top_k.max())
        return Filters(
            self._tensor(top_k),
            self._tensor(numbers[:, TOP_P].copy()),
            self._tensor(numbers[:, MIN_P].astype(np.float32)),
            widest if widest < NO_TOP_K else None,
        )

    def _penalized(self, sequences: list[Sequence], numbers: Numbers) -> Penalized | None:
        mask = np.array([sequence.prompt.sampling.penalized for sequence in sequences])
        if not mask.any():
            return None
        rows = np.flatnonzero(mask)
        seen = self._seen.find_rows([sequences[row] for row in rows])
        table = self._tensor(numbers[rows].astype(np.float32))
        return Penalized(
            self._rows(mask),
            seen,
            self._tensor(seen),
            *(table[:, column, None] for column in (REPETITION, PRESENCE, FREQUENCY)),
        )

    def _logprob_rows(self, samplings: list[SamplingParams]) -> LogprobRows | None:
        asked = {row: s.logprobs for row, s in enumerate(samplings) if s.logprobs is not None}
        if not asked:
            return None
        mask = np.isin(np.arange(len(samplings)), list(asked))
        return LogprobRows(list(asked), list(asked.values()), self._rows(mask))

    def _rows(self, mask: RowMask) -> Rows:
        return Rows(None if mask.all() else self._tensor(np.flatnonzero(mask)))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)


def _numbers(sampling: SamplingParams) -> tuple[float, ...]:
    """Parameters by the columns named above."""
    return (
        sampling.temperature,
        sampling.top_p if sampling.top_p < 1 else NO_TOP_P,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
