"""The limits of one API key in `gateway.key_limits`. Pure."""

from collections.abc import Mapping
from math import ceil
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from services.runtime.config import Listed

Limit = Annotated[int, Field(strict=True, ge=1, le=10**12)]  # strict: `true` is not 1


class KeyLimits(BaseModel):
    """What the requests of one key may use. An omitted limit is unlimited."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None  # of prompts and answers
    concurrent_requests: Limit | None = None
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

    def share(self, parts: int) -> Self:
        """The limits of one of `parts` gateways, at least 1 of each."""
        counts = self.model_dump(exclude_none=True, exclude={"sla_classes"})
        return self.model_copy(update={name: ceil(n / parts) for name, n in counts.items()})
