"""The memory model: how many tokens of KV there is room for, and how many a batch may plan with.

SCLS (papers/003 §4.3), in its letters: M_cap all that there is, M_model what the parameters take,
M_engine what the engine works in, Δ bytes a token of KV, ζ the share that may be planned with.
"""

from dataclasses import dataclass

import numpy as np

from services.forecast import Ints

ZETA = 0.9
"""SCLS' share for an engine that fragments its memory. Blocks here are made once and given whole,
so nothing is lost but in a last block: what is planned in blocks may plan with all (ζ = 1)."""


@dataclass(frozen=True, slots=True)
class KVMemory:
    """What is left for KV on a device, in bytes."""

    capacity_bytes: int  # M_cap
    model_bytes: int  # M_model, and whatever else is there already
    engine_bytes: int  # M_engine: the largest step's activations, staging
    token_bytes: int  # Δ

    @property
    def available_bytes(self) -> int:
        """M_ava, Eq. 6; below 0 where not even the rest fits."""
        return self.capacity_bytes - self.model_bytes - self.engine_bytes

    @property
    def tokens(self) -> int:
        """Of KV that fit: M_ava / Δ."""
        return max(0, self.available_bytes // self.token_bytes)


def planned_tokens(kv_tokens: int, zeta: float = ZETA) -> int:
    """Of a device's KV tokens those that a batch may plan with: ζ·M_ava / Δ."""
    return int(zeta * kv_tokens)


def batch_tokens(seqs: Ints, length: Ints, steps: int, block_tokens: int = 1) -> Ints:
    """KV of static batches, each of `seqs` padded to `length`, at the end of `steps` more: Eq. 5,
    (L + S)·N, in whole blocks."""
    blocks: Ints = seqs * -(-(length + steps) // block_tokens)
    return blocks * block_tokens


def most_seqs(
    kv_tokens: int, length: Ints, steps: int, zeta: float = ZETA, block_tokens: int = 1
) -> Ints:
    """N_max by length: the largest batch that fits by Eq. 9, 0 where not one does."""
    one = batch_tokens(np.ones_like(length), length, steps, block_tokens)
    return planned_tokens(kv_tokens, zeta) // np.maximum(one, 1)
