"""KV capacity of a device in tokens.

SCLS (Cheng et al., 2024), §4.3, in its symbols: M_cap total memory, M_model parameters, M_engine
working memory of the engine, Δ bytes of KV per token. The share ζ that a static batch may plan with
belongs to batch formation (services/policies/form).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVMemory:
    """Memory of a device by use, in bytes."""

    capacity_bytes: int  # M_cap
    model_bytes: int  # M_model, and other memory already in use
    engine_bytes: int  # M_engine: the largest step's activations, staging
    token_bytes: int  # Δ

    @property
    def available_bytes(self) -> int:
        """M_ava, Eq. 6. Negative if model and engine alone exceed the capacity."""
        return self.capacity_bytes - self.model_bytes - self.engine_bytes

    @property
    def tokens(self) -> int:
        """Tokens of KV that fit: M_ava / Δ."""
        return max(0, self.available_bytes // self.token_bytes)
