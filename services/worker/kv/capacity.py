"""How many tokens of KV a device has room for.

SCLS (papers/003 §4.3), in its letters: M_cap all that there is, M_model what the parameters take,
M_engine what the engine works in, Δ bytes a token of KV. The share ζ that a static batch may plan
with is its form's (services/policies/form).
"""

from dataclasses import dataclass


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
