"""Settings of the predictor, with their defaults and reasons."""

from typing import ClassVar

from pydantic import Field

from services.runtime.main import ServedSettings


class PredictorConfig(ServedSettings):
    """Section `predictor`."""

    section: ClassVar[str] = "predictor"

    address: str = "127.0.0.1:50053"  # host:port, or unix:/path
    model: str = "history"  # a name of predictors.PREDICTORS
    # papers/000 §3.2: 1,000 balances steady and shifting mixes; more gains little.
    window: int = Field(default=1_000, ge=1, le=1_000_000)
    # Fewer outcomes than this say less of an application than its model's thousand do.
    application_min: int = Field(default=30, ge=1)
    # Names come from clients, so their number is bounded: 1,024 full windows are about 40 MB.
    populations_max: int = Field(default=1_024, ge=2)
