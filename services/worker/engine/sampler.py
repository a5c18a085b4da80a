"""Sampler: one token a row of logits, a pure function of (seed, position, logits), whatever else is
in the batch.

A sequence that was evicted, moved or resumed draws what it would have drawn. Filters follow the
field: penalties, then temperature, top_k, top_p among what top_k left, min_p relative to the
likeliest.

Nothing here waits for the device: what a row needs is decided by its parameters alone, and what
the host must know of earlier draws is only how many there were. While the same sequences draw, a
step makes no tensor of its parameters and copies nothing to the device: positions and what was
seen move on there.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine.seen_tokens import SeenTokens, to_device
from services.worker.kernels.interface import FilteredDraw, Filters
from services.worker.kernels.reference.draws import draw, likeliest, stream_keys, uniforms
from services.worker.requests.batch import Ints, TokenLogprobs
from services.worker.requests.prompt import MAX_LOGPROBS, SamplingParams
from services.worker.requests.sequence import Sequence

NO_TOP_K = 2**31 - 1
NO_TOP_P = 2.0  # above all sums: these may end a little above 1
ALL_BITS = 2**64 - 1
NUMBERS_AHEAD = 32  # of a row, made at once: as many calls as one takes
NOTHING = torch.zeros(0)
# Of a row's numbers, by column.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)


def is_plain(sampling: SamplingParams) -> bool:
    """Whether a row is nothing but an argmax, from its first token to its last."""
    return (
        sampling.temperature == 0
        and not sampling.penalized
        and sampling.logprobs is None
        and not sampling.min_tokens
    )


class Drawn:
    """What a step drew. `tokens` [rows], int64, is on the device, for the next step to read there;
    the copies that `take` waits for were begun when this was made."""

    def __init__(self, tokens: Tensor, asked: "_Asked | None" = None, raw: Tensor | None = None):
        self.tokens = tokens
        self._asked = asked
        made = [tokens]
        if asked is not None and raw is not None:
            made += asked.of(raw, tokens)
        self._copies = [x.to("cpu", non_blocking=True) for x in made]
        self._made: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._made = torch.cuda.Event()  # type: ignore[no-untyped-call]  # no types
            self._made.record(torch.cuda.current_stream(tokens.device))

    def take(self) -> tuple[list[int], dict[int, TokenLogprobs]]:
        """A token a row, and logprobs of the rows that ask. Waits for the device: the only place
        of a step that does."""
        if self._made is not None:
            self._made.synchronize()
        tokens, *told = (x.tolist() for x in self._copies)
        if self._asked is None or not told:
            return tokens, {}
        rows = zip(self._asked.rows, self._asked.tops, *told, strict=True)
        return tokens, {
            row: TokenLogprobs(chosen, tuple(ids[:top]), tuple(best[:top]))
            for row, top, chosen, best, ids in rows
        }


@dataclass(frozen=True, slots=True)
class _Rows:
    """Some rows of a batch; `index` is None where it is all of them."""

    index: Tensor | None

    def of(self, x: Tensor) -> Tensor:
        return x if self.index is None else x.index_select(0, self.index)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Who asks for logprobs: which rows, and how many of the likeliest each."""

    rows: list[int]
    tops: list[int]
    where: _Rows

    def of(self, raw: Tensor, tokens: Tensor) -> list[Tensor]:
        """Of raw logprobs [rows that ask, vocabulary]: of the token drawn, of the likeliest, and
        which these are. As many for every row: ties are then the same in any company."""
        chosen = raw.gather(-1, self.where.of(tokens)[:, None])[:, 0]
        width = min(MAX_LOGPROBS, raw.shape[-1]) if any(self.tops) else 0
        best = raw.topk(width)
        return [chosen, best.values, best.indices]


@dataclass(frozen=True, slots=True)
class _Penalized:
    """Rows of the batch, their rows among those that have seen tokens, and columns [rows, 1]."""

    rows: _Rows
    seen: Ints
    seen_index: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor

    def change(self, logits: Tensor, ids: Tensor, times: Tensor) -> None:
        """In place, the tokens seen and no others: repetition is over prompt and output (Keskar et
        al. 2019, §4.1), presence and frequency over output."""
        mine = self.rows.of(logits)
        x = mine.gather(-1, ids)
        # Exact, for one of the two is 0; a choice between them is slower, and guesses wrong.
        x = x.clamp(min=0) / self.repetition + x.clamp(max=0) * self.repetition
        x = x - self.presence * times.clamp(max=1) - self.frequency * times
        mine.scatter_(-1, ids, x)
        if self.rows.index is not None:
            logits.index_copy_(0, self.rows.index, mine)


@dataclass(frozen=True, slots=True)
class _Early:
    """Rows that may not end before a position: `cells` of the logits are theirs, for each end."""

    rows: _Rows
    cells: tuple[Tensor, Tensor]
    min_tokens: Tensor

    def change(self, logits: Tensor, positions: Tensor) -> None:
        early = self.rows.of(positions)[:, None] < self.min_tokens
        logits[self.cells] = logits[self.cells].masked_fill(early, -torch.inf)


@dataclass(frozen=True, slots=True)
class _Random:
    """Rows that draw in one way: all their weights where `filters` is None."""

    rows: _Rows
    temperature: Tensor | None  # [rows, 1]; None where all are 1
    filters: Filters | None

    def draw(self, logits: Tensor, uniform: Tensor, filtered: FilteredDraw) -> Tensor:
        logits = self.rows.of(logits)
        if self.temperature is not None:
            logits = logits / self.temperature
        probs = logits.softmax(-1)
        if self.filters is None:
            return draw(probs, self.rows.of(uniform))
        return filtered(probs, self.filters, self.rows.of(uniform))


@dataclass(slots=True)
class _Plan:
    """How a batch's rows are drawn. `lengths`, on the host, are the tokens each sequence has;
    `positions` of the tokens to draw among their outputs', and `keys` of the generator, [rows];
    `numbers` [NUMBERS_AHEAD, rows] are its next, of which `taken` have been used."""

    sequences: list[Sequence]
    lengths: Ints
    positions: Tensor
    keys: Tensor
    greedy: bool  # some rows are
    random: list[_Random]
    penalized: _Penalized | None
    early: _Early | None
    asked: _Asked | None
    numbers: Tensor = NOTHING
    taken: int = NUMBERS_AHEAD

    def suits(self, sequences: list[Sequence], lengths: Ints) -> bool:
        return self.sequences == sequences and bool((self.lengths == lengths).all())

    def uniform(self) -> Tensor:
        """A number in [0, 1) for each row's next token."""
        if self.taken == NUMBERS_AHEAD:
            steps = torch.arange(NUMBERS_AHEAD, device=self.positions.device)[:, None]
            self.numbers, self.taken = uniforms(self.keys, self.positions + steps), 0
        self.taken += 1
        return self.numbers[self.taken - 1]

    def advance(self) -> None:
        """To the tokens after those just drawn."""
        self.positions.add_(1)
        self.lengths += 1


class Sampler:
    """Draws for one model's batches. Not thread-safe."""

    def __init__(
        self,
        device: torch.device,
        vocab_size: int,
        eos_ids: Iterable[int],
        filtered: FilteredDraw,
    ):
        self._device = device
        known = sorted(token for token in eos_ids if token < vocab_size)
        self._eos = self._tensor(np.array(known, np.int64))
        self._filtered = filtered
        self._plain: list[Sequence] = []  # the last batch that was nothing but an argmax
        self._plan: _Plan | None = None  # of the last that was more
        self.seen = SeenTokens(device, vocab_size)

    def clear(self) -> None:
        """Forget all requests."""
        self._plain, self._plan = [], None
        self.seen.clear()

    @torch.inference_mode()
    def draw(self, sequences: list[Sequence], logits: Tensor) -> Drawn:
        """A token for each of `sequences`, from its row of `logits` [rows, vocabulary], which are
        not modified. It counts as seen at once: a step may be drawn before the host knows the
        tokens of the one before. Each such token has its place at the end of its sequence's
        `tokens`, negative until it is known. Raises ValueError where it was not drawn here.
        """
        if self._is_plain(sequences):
            return Drawn(likeliest(logits))
        plan = self._plan_for(sequences)
        self._plan = None  # should what follows fail, for then the device may be half a step ahead
        raw = plan.asked.where.of(logits).float().log_softmax(-1) if plan.asked else None
        tokens = self._draw(plan, logits)
        plan.advance()
        self._plan = plan
        return Drawn(tokens, plan.asked, raw)

    def _is_plain(self, sequences: list[Sequence]) -> bool:
        if sequences == self._plain:
            return True
        if not all(is_plain(sequence.prompt.sampling) for sequence in sequences):
            return False
        self._plain = list(sequences)
        return True

    def _draw(self, plan: _Plan, logits: Tensor) -> Tensor:
        given = logits
        logits = logits.float()
        if logits is given and (plan.penalized or plan.early):
            logits = logits.clone()
        penalized = plan.penalized
        ids = times = NOTHING
        if penalized:
            ids, times = self.seen.look(penalized.seen, penalized.seen_index)
            penalized.change(logits, ids, times)
        if plan.early:
            plan.early.change(logits, plan.positions)
        tokens = self._choose(plan, logits)
        if penalized:
            drawn = penalized.rows.of(tokens)
            self.seen.count(penalized.seen, penalized.seen_index, ids, times, drawn)
        return tokens

    def _choose(self, plan: _Plan, logits: Tensor) -> Tensor:
        if plan.greedy or not plan.random:
            tokens = likeliest(logits)
        else:
            tokens = torch.empty(len(logits), dtype=torch.long, device=logits.device)
        if not plan.random:
            return tokens
        uniform = plan.uniform()
        for way in plan.random:
            drawn = way.draw(logits, uniform, self._filtered)
            if way.rows.index is None:
                return drawn
            tokens.index_copy_(0, way.rows.index, drawn)
        return tokens

    # The plan of a batch, O(rows); made again when its rows or their order change

    def _plan_for(self, sequences: list[Sequence]) -> _Plan:
        lengths = np.array([len(sequence.tokens) for sequence in sequences], np.int64)
        if self._plan is None or not self._plan.suits(sequences, lengths):
            self._plan = self._plan_of(sequences, lengths)
        return self._plan

    def _plan_of(self, sequences: list[Sequence], lengths: Ints) -> _Plan:
        all_of = [sequence.prompt.sampling for sequence in sequences]
        numbers = np.array([_numbers(s) for s in all_of])
        top_k = np.array([s.top_k or NO_TOP_K for s in all_of], np.int64)
        seeds = np.array([s.seed & ALL_BITS for s in all_of], np.uint64).view(np.int64)
        prompts = np.array([sequence.prompt_tokens for sequence in sequences], np.int64)
        return _Plan(
            sequences=list(sequences),
            lengths=lengths,
            positions=self._tensor(lengths - prompts),
            keys=stream_keys(self._tensor(seeds)),
            greedy=bool((numbers[:, TEMPERATURE] == 0).any()),
            random=self._random(numbers, top_k),
            penalized=self._penalized(sequences, numbers),
            early=self._early(np.array([s.min_tokens for s in all_of], np.int64)),
            asked=self._asked(all_of),
        )

    def _random(self, numbers: NDArray[np.float64], top_k: Ints) -> list[_Random]:
        """Whether a row is filtered, and how, is by its own parameters; those that set a top_k
        stand apart, as fewer of their tokens need to be looked at."""
        random = numbers[:, TEMPERATURE] > 0
        limited = top_k < NO_TOP_K
        filtered = limited | (numbers[:, TOP_P] < 1) | (numbers[:, MIN_P] > 0)
        ways = (
            (random & ~filtered, False),
            (random & limited, True),
            (random & filtered & ~limited, True),
        )
        return [
            _Random(
                self._rows(rows),
                self._temperatures(numbers[rows, TEMPERATURE].astype(np.float32)),
                self._filters(numbers[rows], top_k[rows]) if is_filtered else None,
            )
            for rows, is_filtered in ways
            if rows.any()
        ]

    def _temperatures(self, temperatures: NDArray[np.float32]) -> Tensor | None:
        return None if (temperatures == 1).all() else self._tensor(temperatures[:, None])

    def _filters(self, numbers: NDArray[np.float64], top_k: Ints) -> Filters:
        widest = int(top_k.max())
        return Filters(
            self._tensor(top_k),
            self._tensor(numbers[:, TOP_P].copy()),
            self._tensor(numbers[:, MIN_P].astype(np.float32)),
            widest if widest < NO_TOP_K else None,
        )

    def _penalized(
        self, sequences: list[Sequence], numbers: NDArray[np.float64]
    ) -> _Penalized | None:
        mask = np.array([sequence.prompt.sampling.penalized for sequence in sequences])
        if not mask.any():
            return None
        rows = np.flatnonzero(mask)
        seen = self.seen.rows_of([sequences[row] for row in rows])
        table = self._tensor(numbers[rows].astype(np.float32))
        return _Penalized(
            self._rows(mask),
            seen,
            self._tensor(seen),
            *(table[:, column, None] for column in (REPETITION, PRESENCE, FREQUENCY)),
        )

    def _early(self, min_tokens: Ints) -> _Early | None:
        rows = np.flatnonzero(min_tokens)
        if not len(rows) or not len(self._eos):
            return None
        cells = (self._tensor(rows[:, None]), self._eos[None])
        return _Early(self._rows(min_tokens > 0), cells, self._tensor(min_tokens[rows, None]))

    def _asked(self, samplings: list[SamplingParams]) -> _Asked | None:
        asked = {row: s.logprobs for row, s in enumerate(samplings) if s.logprobs is not None}
        if not asked:
            return None
        mask = np.isin(np.arange(len(samplings)), list(asked))
        return _Asked(list(asked), list(asked.values()), self._rows(mask))

    def _rows(self, mask: NDArray[np.bool_]) -> _Rows:
        return _Rows(None if mask.all() else self._tensor(np.flatnonzero(mask)))

    def _tensor(self, array: NDArray[np.generic]) -> Tensor:
        return to_device(array, self._device)


def _numbers(sampling: SamplingParams) -> tuple[float, ...]:
    return (
        sampling.temperature,
        sampling.top_p if sampling.top_p < 1 else NO_TOP_P,
        sampling.min_p,
        sampling.repetition_penalty,
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
