"""Training losses; scores [n] or [n, outputs], targets [n]."""

from collections.abc import Callable

import torch
from torch import Tensor

LIST = 32  # Learning to Rank (Fu et al., NeurIPS 2024), §5.1: lists of 32, buckets of 10 tokens
BUCKET_TOKENS = 10
CLASSES = 10

Loss = Callable[[Tensor, Tensor], Tensor]


def list_mle(scores: Tensor, lengths: Tensor) -> Tensor:
    """−log P(true order), averaged over lists of 32 (Learning to Rank, Fu et al., NeurIPS 2024, Eq.
    2-3); long answers score high.

    Requests in one bucket are equal and stay in the order they were drawn.
    """
    lists = len(scores) // LIST
    scores, lengths = (t[: lists * LIST].view(lists, LIST) for t in (scores, lengths))
    order = torch.div(lengths, BUCKET_TOKENS, rounding_mode="floor").argsort(
        dim=1, descending=True, stable=True
    )
    ranked = scores.gather(1, order)
    left = ranked.flip(1).logcumsumexp(1).flip(1)
    return (left - ranked).mean()


def l1(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean absolute error (the proxy models in ALISE, Zhao et al., 2024, §2)."""
    return (scores - targets).abs().mean()


def cross_entropy(scores: Tensor, classes: Tensor) -> Tensor:
    """Classification by length (Learning to Rank, Fu et al., NeurIPS 2024, §5.1,
    "Classification")."""
    return torch.nn.functional.cross_entropy(scores, classes.long())
