"""What every predictor is: forecasts for a batch of requests, learnt from finished ones.

A `Prompt` is read into `Features`, which stand for it in a `Query`; with its answer's length that
is an `Example`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from services.core import FinishReason
from services.forecast import Forecast
from services.lengths import PRIOR, WINDOW

Vector = NDArray[np.float32]
Columns = NDArray[np.int32]

WORD_COLUMNS = 2**18
LAYERS = 3  # of the encoder, whose states are kept: meaning, and more of the wording before it
NUMBERS = (  # each as log(1 + x)
    "user_input_chars",
    "instruction_chars",
    "prompt_tokens",
    "turns",  # answers already given in this conversation
    "last_answer_tokens",
    "mean_answer_tokens",
    "largest_number",  # of six digits at most: “in 200 words”, “ten times” aside
    "user_input_words",
)

Wording = tuple[str | None, str]  # instruction (None: whatever it is), user input
Told = Mapping[Wording, int]  # output tokens of what is so asked


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is known of a request before it runs.

    answers: tokens of the assistant's earlier answers in this conversation, in order.
    """

    instruction: str
    user_input: str
    prompt_tokens: int
    answers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Features:
    """Meaning, words and sizes of one prompt.

    instruction, user_input: [LAYERS, dim]: the mean states of the encoder's last layers, each of
        unit length; the last row is the sentence embedding, repeated where its pooling changes
        the dimension. Zeros where a part is empty, and for layers the encoder lacks.
    words: hashed word uni- and bigrams of both parts, columns in [0, WORD_COLUMNS), ascending,
        once each, at most 512.
    numbers: [len(NUMBERS)], in the order of NUMBERS.
    """

    instruction: Vector
    user_input: Vector
    words: Columns
    numbers: Vector


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

    window: int = WINDOW
    application_min: int = 30
    populations_max: int = 1_024
    examples: int = 50_000
    neighbours_window: int = 50_000
    similarity_min: float = 0.6
    prior: float = PRIOR  # entries that stand for the empty part of a window
    lengths: Callable[[], Told] = dict  # read when an oracle is built


class Predictor(Protocol):
    """Forecasts output lengths and learns from outcomes; `version` counts what it has learnt."""

    @property
    def version(self) -> int: ...

    def forecast(self, batch: Sequence[Query]) -> list[Forecast]:
        """One forecast a query, in order, not cut at the query's own `max_tokens`; a shared one is
        UNCAPPED."""
        ...

    def learn(self, examples: Sequence[Example]) -> int:
        """Learn from what is fit to learn from; how many that were. Quick: no fitting here."""
        ...
