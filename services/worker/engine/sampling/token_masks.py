"""Biases and masks by token id: logit_bias, allowed tokens, bad tokens, min_tokens. Those of
grammars are in grammar_masks.py.

As in vLLM, masks apply before penalties, temperature and filters. Tokens outside the allowed ones
are never drawn. Other masked tokens are drawn only if no other token is left, such as before
`min_tokens` when the end is the only allowed token. Rows without masks cost nothing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.worker.engine.sampling.drawn import Rows
from services.worker.requests.types.sequence import Sequence

# Below all logits but finite: if all allowed tokens are masked, one of them is still drawn.
MASKED_LOGIT = -1e30
NO_TOKEN, ANY_TOKEN = -1, -2

ToDevice = Callable[[NDArray[np.generic]], Tensor]


@dataclass(frozen=True, slots=True)
class Cells:
    """Positions in a batch's logits: `rows` and `ids`, [cells]; unique, or written with equal
    values."""

    rows: Tensor
    ids: Tensor

    @classmethod
    def upload(cls, cells: list[tuple[int, int]], send: ToDevice) -> "Cells":
        rows, ids = np.array(cells, np.int64).T
        return cls(send(rows.copy()), send(ids.copy()))

    def read(self, logits: Tensor) -> Tensor:
        return logits[self.rows, self.ids]

    def write(self, logits: Tensor, x: Tensor) -> None:
        logits[self.rows, self.ids] = x

    def mask(self, logits: Tensor, which: Tensor) -> None:
        """Masks the cells where `which` [cells] is true; tokens that are not allowed stay at
        −inf."""
        x = self.read(logits)
        self.write(logits, torch.where(which, x.clamp(max=MASKED_LOGIT), x))


class Mask(ABC):
    """One kind of mask, for the rows of a batch that have it."""

    @abstractmethod
    def change(self, logits: Tensor, positions: Tensor) -> None:
        """Changes the logits in place. `positions` [rows] are the output positions of the tokens to
        draw."""

    def advance(self, drawn: Tensor) -> None:  # noqa: B027 - nothing to do by default
        """Called after each row of the batch has drawn a token."""


@dataclass(frozen=True, slots=True)
class Biased(Mask):
    cells: Cells
    bias: Tensor

    def change(self, logits: Tensor, positions: Tensor) -> None:
        self.cells.write(logits, self.cells.read(logits) + self.bias)


@dataclass(frozen=True, slots=True)
class Allowed(Mask):
    """`rows` draw only the tokens of their `cells`."""

    rows: Tensor
    cells: Cells

    def change(self, logits: Tensor, positions: Tensor) -> None:
        kept = self.cells.read(logits)
        logits.index_fill_(0, self.rows, -torch.inf)
        self.cells.write(logits, kept)


@dataclass(frozen=True, slots=True)
class Early(Mask):
    """`cells` are tokens that end a row, masked while its position is below `min_tokens`
    [cells]."""

    cells: Cells
    min_tokens: Tensor

    def change(self, logits: Tensor, positions: Tensor) -> None:
        early = positions.index_select(0, self.cells.rows) < self.min_tokens
        self.cells.mask(logits, early)


@dataclass(slots=True)
class Banned(Mask):
    """Bad token sequences: the last token of each is masked if the output ends with the others.

    `tail` [rows, longest] are the last output tokens of `rows`, on the device, so that the host
    need not know the newest. Of each bad sequence, `prefix` [sequences, longest] are all tokens but
    the last, `tail_row` is its row of `tail`, and `ends` is the cell of its last token, which
    several sequences may share.
    """

    rows: Rows
    tail: Tensor
    prefix: Tensor
    tail_row: Tensor
    ends: Tensor
    cells: Cells

    def change(self, logits: Tensor, positions: Tensor) -> None:
        tail = self.tail.index_select(0, self.tail_row)
        met = ((self.prefix == tail) | (self.prefix == ANY_TOKEN)).all(-1)
        masked = torch.zeros_like(self.cells.ids).index_add_(0, self.ends, met.long()) > 0
        self.cells.mask(logits, masked)

    def advance(self, drawn: Tensor) -> None:
        newest = self.rows.select(drawn)[:, None]
        self.tail = torch.cat([self.tail, newest], -1)[:, 1:]


def build_masks(
    sequences: list[Sequence], eos_ids: Iterable[int], newest: Tensor, send: ToDevice
) -> list[Mask]:
    """The masks of a batch, in the order of application. `newest` are the tokens of the step in
    flight: an unknown last token of a sequence is the one in its `sampling_row` of that step.
    O(rows + named ids).

    Raises ValueError if a relevant token was not drawn here.
    """
    if not any(s.prompt.sampling.masked or s.prompt.sampling.min_tokens for s in sequences):
        return []
    masks = (
        _biased(sequences, send),
        _allowed(sequences, send),
        _early(sequences, eos_ids, send),
        _banned(sequences, newest, send),
    )
    return [mask for mask in masks if mask is not None]


def _biased(sequences: list[Sequence], send: ToDevice) -> Biased | None:
    asked = enumerate(sequence.prompt.sampling.logit_bias for sequence in sequences)
    every = [(row, token, bias) for row, each in asked for token, bias in each]
    if not every:
        return None
    bias = send(np.array([bias for *_, bias in every], np.float32))
    return Biased(Cells.upload([(row, token) for row, token, _ in every], send), bias)


def _allowed(sequences: list[Sequence], send: ToDevice) -> Allowed | None:
    every = [sequence.prompt.sampling.allowed_token_ids for sequence in sequences]
    rows = np.array([row for row, tokens in enumerate(every) if tokens], np.int64)
    if not len(rows):
        return None
    ids = [np.array(tokens, np.int64) for tokens in every if tokens]
    cells = Cells(send(np.repeat(rows, [len(tokens) for tokens in ids])), send(np.concatenate(ids)))
    return Allowed(send(rows), cells)


def _early(sequences: list[Sequence], eos_ids: Iterable[int], send: ToDevice) -> Early | None:
    least = {row: s.prompt.sampling.min_tokens for row, s in enumerate(sequences)}
    cells = [
        (row, token)
        for row, s in enumerate(sequences)
        if least[row]
        for token in sorted(s.stop_ids.union(eos_ids))
    ]
    if not cells:
        return None
    return Early(
        Cells.upload(cells, send), send(np.array([least[row] for row, _ in cells], np.int64))
    )


def _banned(sequences: list[Sequence], newest: Tensor, send: ToDevice) -> Banned | None:
    rows = [row for row, s in enumerate(sequences) if s.prompt.sampling.bad_tokens]
    if not rows:
        return None
    asked = enumerate(sequences[row].prompt.sampling.bad_tokens for row in rows)
    every = [(place, rows[place], bad) for place, each in asked for bad in each]
    longest = max(len(bad) for *_, bad in every) - 1
    prefix = np.full((len(every), longest), ANY_TOKEN, np.int64)
    for known, (*_, bad) in zip(prefix, every, strict=True):
        known[longest + 1 - len(bad) :] = bad[:-1]
    last = dict.fromkeys((row, bad[-1]) for _, row, bad in every)
    cells = {cell: number for number, cell in enumerate(last)}
    mask = np.isin(np.arange(len(sequences)), rows)
    return Banned(
        Rows(None if mask.all() else send(np.array(rows, np.int64))),
        _tail([sequences[row] for row in rows], longest, newest, send),
        send(prefix),
        send(np.array([place for place, *_ in every], np.int64)),
        send(np.array([cells[row, bad[-1]] for _, row, bad in every], np.int64)),
        Cells.upload(list(cells), send),
    )


def _tail(sequences: list[Sequence], length: int, newest: Tensor, send: ToDevice) -> Tensor:
    """The last output tokens [sequences, length], NO_TOKEN before the first."""
    known = np.full((len(sequences), length), NO_TOKEN, np.int64)
    for row, sequence in zip(known, sequences, strict=True):
        output = sequence.tokens[max(sequence.prompt_tokens, len(sequence.tokens) - length) :]
        row[length - len(output) :] = output
    unknown = [i for i, s in enumerate(sequences) if length and s.tokens[-1] < 0]
    tail = send(known)
    if unknown:
        sampling_rows = [sequences[i].sampling_row for i in unknown]
        if min(sampling_rows) < 0:
            raise ValueError(
                f"the newest token of {sequences[unknown[0]].request_id} was not drawn here"
            )
        into, source = send(np.array([unknown, sampling_rows], np.int64))
        tail[:, -1] = tail[:, -1].index_copy(0, into, newest.index_select(0, source))
    return tail
