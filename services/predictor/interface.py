"""The predictor interface and its value types.

A `Prompt` is read into `Features`, which represent it in a `Query`. A query with the length of its
answer is an `Example`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.core import FinishReason, LiveAnswers
from services.encoder.layers import LAYERS as LAYERS  # of the vectors of Features
from services.forecast import Forecast
from services.lengths import PRIOR, WINDOW

Vector = NDArray[np.float32]
Columns = NDArray[np.int32]

WORD_COLUMNS = 2**18
NUMBERS = (  # each as log(1 + x)
    "user_input_chars",
    "instruction_chars",
    "prompt_tokens",
    "turns",  # answers already given in this conversation
    "last_answer_tokens",
    "mean_answer_tokens",
    "largest_number",  # at most six digits, as in "in 200 words"; not spelled-out numbers
    "user_input_words",
)

Wording = tuple[str | None, str]  # instruction (None matches any), user input
KnownLengths = Mapping[Wording, int]  # output tokens by wording


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt before its request runs.

    answers: tokens of the assistant's earlier answers in this conversation, in order.
    """

    instruction: str
    user_input: str
    prompt_tokens: int
    answers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """Embeddings, words and sizes of one prompt.

    instruction, user_input: [LAYERS, dim], the mean states of the encoder's last layers, each of
      unit length. The last row is the sentence embedding, repeated when its pooling changes the
      dimension. Zeros for an empty part and for layers that the encoder lacks.
    words: hashed word uni- and bigrams of both parts, unique columns in [0, WORD_COLUMNS),
      ascending, at most 512.
    numbers: [len(NUMBERS)], in the order of NUMBERS.
    """

    instruction: Vector
    user_input: Vector
    words: Columns
    numbers: Vector


@dataclass(frozen=True, slots=True)
class Query:
    """A request with an output length to forecast.

    features: None when no encoder runs or it failed.
    prompt: the text, for predictors that use it directly. It is not stored.
    """

    model: str
    application: str
    prompt_tokens: int
    max_tokens: int
    features: Features | None = None
    prompt: Prompt | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Example:
    """A finished request and the length of its answer."""

    query: Query
    output_tokens: int
    reason: FinishReason = FinishReason.STOP


@dataclass(frozen=True, slots=True)
class Options:
    """Settings of a predictor; config.py gives the reasons for the defaults."""

    window: int = WINDOW
    application_min: int = 30
    populations_max: int = 1_024
    examples: int = 50_000
    neighbours_window: int = 50_000
    similarity_min: float = 0.6
    prior: float = PRIOR  # pseudo-entries for the empty part of a window
    pure: bool = False  # the named model alone answers
    lengths: Callable[[], KnownLengths] = dict  # called when an oracle is built


class Predictor(Protocol):
    """Forecasts output lengths and learns from outcomes. `version` increases when it learns
    and when shared forecasts change."""

    @property
    def version(self) -> int: ...

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        """Returns one forecast per query, in order, not truncated at the query's `max_tokens`. A
        shared forecast is UNCAPPED."""
        ...

    def learn(self, examples: Sequence[Example]) -> int:
        """Learns from the usable examples and returns their number. Fast: fitting happens
        elsewhere."""
        ...

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Replaces the answers that have not ended. They are longer than their tokens so far."""
        ...
