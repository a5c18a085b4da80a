"""Small nets over a frozen encoder's states and words, used by ranker, proxy and classify."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from services.predictor.models.nets.losses import LIST, Loss
from services.predictor.models.preparation import Columns, Preparation
from services.predictor.models.spread import Floats

EpochCallback = Callable[[int], bool]
"""Called with the number of a finished epoch; True stops the training."""

_WORD_DIM, _NAME_DIM, _HIDDEN = 64, 16, 256
WORD_GAIN = 4.0  # scales word vectors to the size of the standardised states
_BATCH = 8 * LIST
_RATE, _EMBEDDING_RATE, _DECAY = 2e-3, 3e-3, 0.05
_WORD_DROPOUT, _INPUT_DROPOUT, _DROPOUT = 0.3, 0.1, 0.35
_EXAMPLES_SEEN = 180_000  # target: smaller training sets get more epochs
_EPOCHS = (6, 15)


@dataclass(frozen=True)
class Inputs:
    """Columns of a batch as tensors."""

    dense: Tensor
    names: Tensor  # [n, 2]: model, application; 0 is unknown
    words: Tensor
    starts: Tensor
    weights: Tensor

    @staticmethod
    def of(columns: Columns) -> "Inputs":
        """Shares the memory of `columns`."""
        return Inputs(*map(torch.from_numpy, (
            columns.dense, columns.names, columns.words, columns.starts, columns.weights
        )))  # fmt: skip


class Net(nn.Module):
    """A deep path over states, numbers, words and names plus a linear path over words and names."""

    middle: Tensor
    deviation: Tensor

    def __init__(self, preparation: Preparation, outputs: int):
        super().__init__()
        view = preparation.view
        self.view = view
        places, names = len(preparation.idf), len(preparation.names) + 1
        dense = len(preparation.middle)
        width = dense + _WORD_DIM * view.words + _NAME_DIM * view.names
        self.words = nn.EmbeddingBag(places, _WORD_DIM, mode="sum", sparse=True)
        self.wide = nn.EmbeddingBag(places, outputs, mode="sum", sparse=True)
        self.names = nn.EmbeddingBag(names, _NAME_DIM, mode="sum", padding_idx=0)
        self.levels = nn.EmbeddingBag(names, outputs, mode="sum", padding_idx=0)
        self.register_buffer("middle", torch.zeros(outputs))
        self.register_buffer("deviation", torch.ones(outputs))
        for table in (self.words, self.names):
            nn.init.normal_(table.weight, std=0.02)
        for table in (self.wide, self.levels):
            nn.init.zeros_(table.weight)
        self.deep = nn.Sequential(
            nn.Dropout(_INPUT_DROPOUT),
            nn.Linear(width, _HIDDEN),
            nn.GELU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(_HIDDEN, _HIDDEN // 2),
            nn.GELU(),
            nn.Dropout(_DROPOUT),
            nn.Linear(_HIDDEN // 2, outputs),
        )

    def forward(self, inputs: Inputs) -> Tensor:
        """Scores [n, outputs]."""
        dense, straight = [inputs.dense], []
        if self.view.words:
            bag = (inputs.words, inputs.starts, inputs.weights)
            dense.append(WORD_GAIN * self.words(bag[0], bag[1], per_sample_weights=bag[2]))
            straight.append(self.wide(bag[0], bag[1], per_sample_weights=bag[2]))
        if self.view.names:
            dense.append(self.names(inputs.names))
            straight.append(self.levels(inputs.names))
        scores: Tensor = self.deep(torch.cat(dense, dim=1))
        for path in straight:
            scores = scores + path
        return scores

    @torch.inference_mode()
    def scores(self, inputs: Inputs) -> Floats:
        """Returns [n, outputs]. A single output is standardised over the training set, because a
        ranking has no scale."""
        scaled: Tensor = (self(inputs) - self.middle) / self.deviation
        return np.asarray(scaled.numpy(), float)

    @torch.inference_mode()
    def settle(self, inputs: Inputs) -> None:
        """Switches to evaluation mode and standardises the scores."""
        self.eval()
        if self.middle.numel() == 1:
            raw = self(inputs)
            self.middle.copy_(raw.mean(dim=0))
            self.deviation.copy_(raw.std(dim=0) + 1e-6)


def train(
    net: Net,
    inputs: Inputs,
    targets: Tensor,
    loss: Loss,
    seed: int,
    epochs: int = 0,
    watch: EpochCallback = lambda _: False,
) -> None:
    """Minimises `loss` over all rows and settles the net. O(epochs · rows).

    epochs: 0 selects a number by the number of rows.
    """
    generator = torch.Generator().manual_seed(seed)
    n = len(targets)
    epochs = epochs or int(np.clip(_EXAMPLES_SEEN // n, *_EPOCHS))
    batches = -(-n // _BATCH)
    tables = [net.words.weight, net.wide.weight]
    others = [p for p in net.parameters() if all(p is not t for t in tables)]
    sparse = torch.optim.SparseAdam(tables, lr=_EMBEDDING_RATE)
    dense = torch.optim.AdamW(others, lr=_RATE, weight_decay=_DECAY)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(
            optimizer, rate, total_steps=epochs * batches, cycle_momentum=False
        )
        for optimizer, rate in ((sparse, _EMBEDDING_RATE), (dense, _RATE))
    ]
    net.train()
    for epoch in range(epochs):
        for rows in _shuffled(n, generator):
            cost = loss(net(_dropped(_select(inputs, rows), generator)), targets[rows])
            sparse.zero_grad()
            dense.zero_grad()
            cost.backward()  # type: ignore[no-untyped-call]  # PyTorch gives it no types
            for optimizer in (sparse, dense):
                optimizer.step()  # type: ignore[no-untyped-call]  # PyTorch gives it no types
            for schedule in schedules:
                schedule.step()
        if watch(epoch):
            break
    net.settle(inputs)


def _shuffled(n: int, generator: torch.Generator) -> Iterator[Tensor]:
    order = torch.randperm(n, generator=generator)
    if n < _BATCH:  # fill the last list with repeated requests
        order = torch.cat([order, torch.randint(n, (-n % LIST,), generator=generator)])
    tail = n % _BATCH
    if n > _BATCH and tail:
        order = torch.cat([order, torch.randint(n, (_BATCH - tail,), generator=generator)])
    yield from torch.split(order, _BATCH)


def _select(inputs: Inputs, rows: Tensor) -> Inputs:
    ends = torch.cat([inputs.starts[1:], torch.tensor([len(inputs.words)])])
    sizes = (ends - inputs.starts)[rows]
    starts = sizes.cumsum(0) - sizes
    within = torch.arange(int(sizes.sum())) - starts.repeat_interleave(sizes)
    places = inputs.starts[rows].repeat_interleave(sizes) + within
    return Inputs(
        inputs.dense[rows], inputs.names[rows], inputs.words[places], starts, inputs.weights[places]
    )


def _dropped(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Drops random words, so that the net does not depend on single words."""
    kept = torch.rand(len(inputs.weights), generator=generator) >= _WORD_DROPOUT
    return Inputs(inputs.dense, inputs.names, inputs.words, inputs.starts, inputs.weights * kept)
