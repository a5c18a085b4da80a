"""Splits an encoder into frozen lower layers with cached states and trainable upper layers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lab.training.token_batches import Ids
from services.encoder.encoder import padded

_MAX_CACHED_TOKENS = 4_000_000  # 3 GB of half-precision states at 384 dimensions
_MASKED = -1e9  # attention bias of padding


class PartiallyTrainedEncoder(nn.Module):
    """Token states of an encoder with `trained` upper layers that are trainable.

    Repeated texts cost only the upper layers. Raises ValueError for an encoder without BERT's
    structure (embeddings, then encoder.layer) or with fewer layers.
    """

    def __init__(self, encoder: PreTrainedModel, trained: int):
        super().__init__()
        self.encoder = encoder
        try:
            layers = list(encoder.encoder.layer)
            embeddings = encoder.embeddings
        except AttributeError:
            raise ValueError("only encoders with BERT's structure support --layers") from None
        if not 1 <= trained <= len(layers):
            raise ValueError(f"the encoder has {len(layers)} layers; {trained} cannot be trained")
        self._lower = [embeddings, *layers[: len(layers) - trained]]
        self._upper = layers[len(layers) - trained :]
        self._cache: dict[tuple[int, ...], Tensor] = {}
        self._cached_tokens = 0
        for module in self._lower:
            module.requires_grad_(False)

    def forward(self, texts: Sequence[Ids]) -> tuple[Tensor, Tensor]:
        """States [n, longest, dim] and mask [n, longest] of non-empty texts."""
        low = self._lower_states(texts)
        mask = nn.utils.rnn.pad_sequence([torch.ones(len(s)) for s in low], batch_first=True)
        states = nn.utils.rnn.pad_sequence(low, batch_first=True)
        for layer in self._upper:
            states = _run_layer(layer, states, mask)
        return states, mask

    def train(self, mode: bool = True) -> "PartiallyTrainedEncoder":
        """Enables dropout in the upper layers only."""
        super().train(mode)
        for module in self._lower:
            module.train(False)
        return self

    def _lower_states(self, texts: Sequence[Ids]) -> list[Tensor]:
        keys = [tuple(ids) for ids in texts]
        new = [key for key in dict.fromkeys(keys) if key not in self._cache]
        computed = dict(zip(new, self._compute(new), strict=True)) if new else {}
        for key, states in computed.items():
            if self._cached_tokens < _MAX_CACHED_TOKENS:
                self._cache[key] = states
                self._cached_tokens += len(states)
        return [(computed[key] if key in computed else self._cache[key]).float() for key in keys]

    @torch.no_grad()
    def _compute(self, texts: Sequence[Ids]) -> list[Tensor]:
        ids, mask = padded(texts, self.encoder.config.pad_token_id or 0)
        embeddings, *layers = self._lower
        states = embeddings(input_ids=ids)
        for layer in layers:
            states = _run_layer(layer, states, mask.float())
        return [row[: len(text)].half() for row, text in zip(states, texts, strict=True)]


def _run_layer(layer: nn.Module, states: Tensor, mask: Tensor) -> Tensor:
    output = layer(states, (1 - mask)[:, None, None, :] * _MASKED)
    next_states: Tensor = output[0] if isinstance(output, tuple) else output
    return next_states
