"""Prompts as token ids, in training batches."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lab.data.examples import ReportProgress, prompt_of
from lab.data.rows import Row
from services.encoder.encoder import Encoder
from services.predictor.encoder.extract import split_prompt
from services.predictor.models.nets.losses import LIST

BATCH = 2 * LIST
_POOL = 32 * BATCH  # prompts per sorting pool

Ids = Sequence[int]
RowIndices = NDArray[np.int64]


@dataclass(frozen=True)
class TokenizedPrompts:
    """Tokenized prompts; all fields have one entry per prompt.

    instructions, user_inputs: token ids as encoded in service; empty without tokens.
    populations: [n] index of model and application, 0 for unknown. lengths: [n] in tokens.
    """

    instructions: Sequence[Ids]
    user_inputs: Sequence[Ids]
    populations: Tensor
    lengths: Tensor

    def __len__(self) -> int:
        return len(self.lengths)

    def select(self, rows: RowIndices) -> "TokenizedPrompts":
        return TokenizedPrompts(
            [self.instructions[i] for i in rows],
            [self.user_inputs[i] for i in rows],
            self.populations[torch.from_numpy(rows)],
            self.lengths[torch.from_numpy(rows)],
        )

    def tokens(self) -> RowIndices:
        both = zip(self.instructions, self.user_inputs, strict=True)
        return np.array([len(a) + len(b) for a, b in both])


Population = tuple[str, str]  # model, application


def populations_of(rows: Sequence[Row]) -> dict[Population, int]:
    names = sorted({(row.model, row.application) for row in rows})
    return {name: number for number, name in enumerate(names, start=1)}


def read_texts(
    rows: Sequence[Row], known: dict[Population, int], encoder: Encoder, progress: ReportProgress
) -> TokenizedPrompts:
    """Tokenizes rows with the encoder's tokenizer and truncation."""
    empty = len(encoder.token_ids(""))
    cache: dict[str, Ids] = {"": []}

    def ids(text: str) -> Ids:
        head = text[: encoder.head_chars]
        if head not in cache:
            found = encoder.token_ids(head)
            cache[head] = found if len(found) > empty else []
        return cache[head]

    instructions, user_inputs = [], []
    for i, row in enumerate(rows):
        if i % 256 == 0:
            progress("reading prompts", i, len(rows))
        prompt = prompt_of(row)
        instruction, user_input = split_prompt(prompt.instruction, prompt.user_input)
        instructions.append(ids(instruction))
        user_inputs.append(ids(user_input))
    return TokenizedPrompts(
        instructions,
        user_inputs,
        torch.tensor(
            [known.get((row.model, row.application), 0) for row in rows], dtype=torch.long
        ),
        torch.tensor([float(row.output_tokens) for row in rows]),
    )


def batches(texts: TokenizedPrompts, generator: np.random.Generator) -> Iterator[RowIndices]:
    """Yields one epoch of shuffled batches with prompts of similar length. The last batch is filled
    with repeated prompts."""
    order = generator.permutation(len(texts))
    sizes = texts.tokens()
    pools = [order[i : i + _POOL] for i in range(0, len(order), _POOL)]
    by_size = [pool[np.argsort(sizes[pool], kind="stable")] for pool in pools]
    filling = generator.choice(order, -len(order) % BATCH)
    epoch = np.concatenate([*by_size, filling]).reshape(-1, BATCH)
    for batch in generator.permutation(epoch, axis=0):
        yield generator.permutation(batch)  # shuffled: ListMLE orders ties by position
