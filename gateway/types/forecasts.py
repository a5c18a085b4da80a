"""Forecasts of one choice: as the scheduler sends them, and as the client receives them."""

from dataclasses import dataclass
from math import isfinite

from services.forecast import Forecast


@dataclass(frozen=True, slots=True)
class SchedulerForecast:
    """The scheduler's forecast of one choice.

    `token_s` is the expected time per token while the choice runs. `ttft_s` is the expected time
    from arrival to the first token. Raises ValueError if a time is negative or not finite.
    """

    forecast: Forecast
    token_s: float
    ttft_s: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("token_s", self.token_s), ("ttft_s", self.ttft_s or 0.0)):
            if not (isfinite(value) and value >= 0):
                raise ValueError(f"forecast {name} must be finite and not negative, not {value}")


@dataclass(frozen=True, slots=True)
class ClientForecast:
    """Total output tokens of a choice and the expected seconds from now to its end.

    Tokens sent ≤ low ≤ expected ≤ high ≤ max_tokens. `ttft_s`, counted from arrival, is promised at
    submission: about 90 % of first tokens are sent by then. `sla_expected` is whether the SLA holds
    by that promise. Both are present only until something has been sent.
    """

    expected_tokens: float
    low_tokens: int
    high_tokens: int
    end_s: float
    ttft_s: float | None = None
    sla_expected: bool | None = None
