"""What every predictor is: forecasts for a batch of requests, learnt from finished ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from services.core import FinishReason
from services.forecast import Forecast
from services.predictor.encoder.extract import Prompt
from services.predictor.encoder.features import Features

Asked = tuple[str | None, str]  # instruction (None: whatever it is), user input
Lengths = Mapping[Asked, int]  # output tokens of what is asked

LEARNT_FROM = frozenset({FinishReason.STOP, FinishReason.LENGTH})  # the others were cut short


@dataclass(frozen=True, slots=True)
class Query:
    """A request whose output length is asked for.

    `features` stands for the prompt's text; None where no encoder runs or it failed. `prompt` is
    the text itself, for who looks it up; nobody keeps it.
    """

    model: str
    application: str
    prompt_tokens: int
    max_tokens: int
    features: Features | None = None
    prompt: Prompt | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Example:
    """A finished request: what was asked, and how long its answer was."""

    query: Query
    output_tokens: int
    reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True)
class Options:
    """What a predictor may be told; the reasons of the defaults stand in config.py."""

    window: int = 1_000
    application_min: int = 30
    populations_max: int = 1_024
    examples: int = 50_000
    neighbours_window: int = 50_000
    similarity_min: float = 0.6
    lengths: Callable[[], Lengths] = dict  # read when an oracle is built


class Predictor(Protocol):
    """Forecasts output lengths and learns from outcomes; `version` counts what it has learnt."""

    @property
    def version(self) -> int: ...

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        """One forecast a query, in order, not cut at the query's own `max_tokens`."""
        ...

    def learn(self, examples: Sequence[Example]) -> int:
        """Learn from what is fit to learn from; how many that were. Quick: no fitting here."""
        ...
