"""The limits of one API key in `gateway.key_limits`. Pure."""

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.runtime.config import Listed

Limit = Annotated[int, Field(strict=True, ge=1, le=10**12)]  # strict: `true` is not 1
Weight = Annotated[float, Field(strict=True, ge=0.001, le=1000, allow_inf_nan=False)]
AMOUNTS = ("requests_per_minute", "tokens_per_minute", "concurrent_requests", "queued_tokens")


class KeyLimits(BaseModel):
    """What the requests of one key may use. An omitted limit is unlimited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers
    concurrent_requests: Limit | None = None
    queued_tokens: Limit | None = None  # of prompts and answers that wait for their first worker
    # Its share of the workers against the other tenants while they wait, of which each has 1.
    # Omitted: the key is no tenant of its own.
    weight: Weight | None = None
    # Empty: every class. `custom`: explicit budgets.
    sla_classes: Listed = ()

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, given: object) -> object:
        for name in given if isinstance(given, Mapping) else ():
            if name not in cls.model_fields:
                known = ", ".join(cls.model_fields)
                raise ValueError(f"{name} is not a limit of a key; known: {known}")
        return given

    @property
    def amounts(self) -> Mapping[str, int]:
        """The limits that gateways divide or share."""
        amounts = {name: getattr(self, name) for name in AMOUNTS}
        return {name: amount for name, amount in amounts.items() if amount is not None}

    def share(self, parts: int) -> Self:
        """The limits of one of `parts` gateways, at least 1 of each."""
        shares = {name: ceil(amount / parts) for name, amount in self.amounts.items()}
        return self.model_copy(update=shares)
