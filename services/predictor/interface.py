"""What every predictor is: forecasts for a batch of requests, learnt from finished ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.core import Outcome
from services.forecast import Forecast


@dataclass(frozen=True, slots=True)
class Query:
    """A request whose output length is asked for. The texts are read, never kept."""

    model: str
    application: str
    prompt_tokens: int
    max_tokens: int
    instruction: str = ""
    user_input: str = ""


@dataclass(frozen=True, slots=True)
class Options:
    """What a predictor may be told; the reasons of the defaults stand in config.py."""

    window: int = 1_000
    application_min: int = 30
    populations_max: int = 1_024


class Predictor(Protocol):
    """Forecasts output lengths and learns from outcomes; `version` counts what it has learnt."""

    @property
    def version(self) -> int: ...

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        """One forecast a query, in order, not cut at the query's own `max_tokens`."""
        ...

    def learn(self, outcomes: Sequence[Outcome]) -> int:
        """Learn from what is fit to learn from; how many that were."""
        ...
