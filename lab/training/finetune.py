"""Learning to rank with a trainable encoder (Learning to Rank, Fu et al., NeurIPS 2024, §4.1)."""

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lab.training.early_stopping import BestWeights, TrainingOptions, TrainingReporter
from lab.training.token_batches import BATCH, Ids, RowIndices, TokenizedPrompts, batches
from lab.training.trainable_layers import PartiallyTrainedEncoder
from services.encoder.encoder import padded
from services.predictor.learning.scorecard import tau_b
from services.predictor.models.nets.losses import list_mle
from services.predictor.models.spread import Floats

EPOCHS = 3
ENCODER_RATE, HEAD_RATE, DECAY = 1e-4, 1e-3, 0.01
PART_RATE = 2e-4  # rate when only upper layers are trained
WARM_UP = 0.1  # share of steps with a rising rate; then the rate falls linearly to 0
CLIP = 1.0
TRIALS_PER_EPOCH = 4
MAX_TRIAL_PROMPTS = 1_000  # held-out prompts per trial


class TunedRanker(nn.Module):
    """An encoder with a linear head on the mean and the first token of the last states of both
    prompt parts. A level per population spares the encoder from learning populations."""

    def __init__(self, encoder: PreTrainedModel, populations: int, layers: int = 0):
        """layers: number of upper layers to train, 0 for all. Raises ValueError as
        PartiallyTrainedEncoder does."""
        super().__init__()
        self.encoder = encoder
        self._partial = PartiallyTrainedEncoder(encoder, layers) if layers else None
        self.head = nn.Linear(4 * encoder.config.hidden_size, 1)
        self.levels = nn.Embedding(populations + 1, 1, padding_idx=0)
        nn.init.zeros_(self.levels.weight)

    def forward(self, texts: TokenizedPrompts) -> Tensor:
        """Scores [n]; long answers score high."""
        read = [self._read(part) for part in (texts.instructions, texts.user_inputs)]
        scores: Tensor = self.head(torch.cat(read, dim=1)) + self.levels(texts.populations)
        return scores[:, 0]

    @torch.inference_mode()
    def scores(self, texts: TokenizedPrompts) -> Floats:
        """[n], computed in batches of similar length."""
        order = np.argsort(texts.tokens(), kind="stable")
        scores = np.empty(len(texts))
        for rows in (order[i : i + BATCH] for i in range(0, len(order), BATCH)):
            scores[rows] = self(texts.select(rows)).numpy()
        return scores

    def _read(self, texts: Sequence[Ids]) -> Tensor:
        """[n, 2 · dim]; zeros for a text without tokens."""
        filled = [i for i, ids in enumerate(texts) if ids]
        out = torch.zeros(len(texts), 2 * self.encoder.config.hidden_size)
        if not filled:
            return out
        states, mask = self._states([texts[i] for i in filled])
        mean = (states * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return out.index_copy(0, torch.tensor(filled), torch.cat([mean, states[:, 0]], dim=1))

    def _states(self, texts: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        if self._partial is not None:
            states, mask = self._partial(texts)
            return states, mask
        ids, mask = padded(texts, self.encoder.config.pad_token_id or 0)
        return self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state, mask


def fine_tune(
    ranker: TunedRanker,
    train_on: TokenizedPrompts,
    held: TokenizedPrompts,
    options: TrainingOptions,
    report: TrainingReporter,
) -> float:
    """Minimises ListMLE, restores the weights of the best trial on `held`, and returns its tau. The
    ranker is left in evaluation mode.

    Deterministic by the seed except for rounding. Raises ValueError when the loss is not finite.
    """
    torch.manual_seed(options.seed)  # seeds dropout
    generator = np.random.default_rng(options.seed)
    epoch_steps = -(-len(train_on) // BATCH)
    steps = (options.epochs or EPOCHS) * epoch_steps
    every = max(1, epoch_steps // TRIALS_PER_EPOCH)
    optimizer, schedule = _optimizer(ranker, steps, options.layers)
    best = BestWeights(ranker, options.patience)
    trial = held.select(np.arange(min(len(held), MAX_TRIAL_PROMPTS)))
    ranker.train()
    title = "fine-tuning"
    for step, rows in enumerate(_batches(train_on, generator, steps), start=1):
        _step(ranker, train_on.select(rows), optimizer, schedule)
        report.progress(title, step, steps)
        if step % every == 0 or step == steps:
            tau = _held_out_tau(ranker, trial)
            title = f"fine-tuning, tau {tau:.3f}"
            report.note(f"fine-tuning, step {step} of {steps}: tau {tau:.3f}")
            if best.offer(tau):
                break
    best.restore()
    ranker.eval()
    return best.tau


def _batches(
    texts: TokenizedPrompts, generator: np.random.Generator, steps: int
) -> Iterator[RowIndices]:
    """Yields `steps` batches over repeated epochs."""
    epochs = (batches(texts, generator) for _ in range(steps))
    return islice(chain.from_iterable(epochs), steps)


def _step(
    ranker: TunedRanker,
    texts: TokenizedPrompts,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
) -> None:
    cost = list_mle(ranker(texts), texts.lengths)
    if not torch.isfinite(cost):
        raise ValueError(
            "the loss of the fine-tuning is not finite; try another --seed or --encoder"
        )
    optimizer.zero_grad()
    cost.backward()  # type: ignore[no-untyped-call]  # PyTorch gives it no types
    nn.utils.clip_grad_norm_(ranker.parameters(), CLIP)
    optimizer.step()
    schedule.step()


def _held_out_tau(ranker: TunedRanker, held: TokenizedPrompts) -> float:
    ranker.eval()
    tau = tau_b(ranker.scores(held), held.lengths.numpy().astype(float))
    ranker.train()
    return tau


def _optimizer(
    ranker: TunedRanker, steps: int, layers: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in ranker.encoder.parameters() if p.requires_grad],
                "lr": PART_RATE if layers else ENCODER_RATE,
            },
            {"params": [*ranker.head.parameters(), *ranker.levels.parameters()], "lr": HEAD_RATE},
        ],
        weight_decay=DECAY,
    )
    warm = max(1, round(WARM_UP * steps))

    def share(step: int) -> float:
        return min((step + 1) / warm, (steps - step) / max(1, steps - warm))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)
