"""The predictor in virtual time: the served predictors' forecasts and learning, without a process.

The named predictor alone answers. Its latency is `Timing.forecast_s`, and `Timing.encode_s` for
each prompt that a sentence encoder reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from services.core import FinishReason, LiveAnswers, Outcome, Request
from services.forecast import Forecast
from services.policies.preset import require_known
from services.predictor.interface import Example, Features, Options, Predictor, Query
from services.predictor.learning.schedule import WORDS
from services.predictor.predictors import ENCODERLESS, PLAIN, READS, build
from simulator.engine.given import GIVEN, forecast_given, known_lengths
from simulator.engine.prompt_forecaster import EXAMPLES, SERVED, LearnedPrompts
from simulator.engine.settings import MODEL, RunSettings
from simulator.workload.prompt_features import encode_prompts, read_words
from simulator.workload.workload import Workload

AnswerTokens = Callable[[str], int]


class Forecaster(Protocol):
    """Answers forecasts and learns outcomes. `encodes`: an encoder reads each prompt first."""

    @property
    def encodes(self) -> bool: ...

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        """One forecast per request, as the predictor gives it."""
        ...

    def study(self, examples: Sequence[Example]) -> None:
        """Learns requests and their answers before the run. Raises ValueError if they are too
        few."""
        ...

    def learn(self, outcome: Outcome, now: float) -> None:
        """Learns a finished request's length."""
        ...

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        """Replaces the answers that have not ended."""
        ...


class LearnedLengths:
    """A served predictor that receives lengths alone."""

    encodes = False

    def __init__(self, predictor: Predictor):
        self._predictor = predictor

    def forecast(self, requests: Sequence[Request]) -> list[Forecast]:
        return self._predictor.forecast(
            [Query(r.model, r.application, r.prompt_tokens, r.max_tokens) for r in requests]
        )

    def study(self, examples: Sequence[Example]) -> None:
        self._predictor.learn(examples)

    def learn(self, outcome: Outcome, now: float) -> None:
        query = Query(outcome.model, outcome.application, outcome.prompt_tokens, outcome.max_tokens)
        self._predictor.learn([Example(query, outcome.output_tokens, outcome.reason)])

    def observe_live(self, answers: Sequence[LiveAnswers]) -> None:
        self._predictor.observe_live(answers)


Build = Callable[[RunSettings, Workload, AnswerTokens], Forecaster]


def _learn_lengths(name: str) -> Build:
    return lambda *_: LearnedLengths(build(name, Options()))


def _learn_prompts(
    name: str, settings: RunSettings, workload: Workload, answer_tokens: AnswerTokens
) -> LearnedPrompts:
    features = _read(name, workload)
    options = Options(examples=EXAMPLES, pure=settings.pure)
    schedule = replace(SERVED, seed=settings.seed)
    if name in ENCODERLESS:
        options = replace(options, examples=WORDS.examples)
        schedule = replace(schedule, interval_s=WORDS.interval_s)
    return LearnedPrompts(name, features, options, schedule)


FORECASTERS: dict[str, Build] = {
    GIVEN: lambda _settings, workload, _answer_tokens: forecast_given(workload),
    "history": _learn_lengths("history"),
    "history-seeded": _learn_lengths("history-seeded"),
    "max": _learn_lengths("max"),
    "oracle": lambda _settings, _workload, answer_tokens: known_lengths(answer_tokens, "oracle"),
    **{name: partial(_learn_prompts, name) for name in READS},
}


def build_forecaster(
    settings: RunSettings, workload: Workload, answer_tokens: AnswerTokens
) -> Forecaster:
    """The predictor of the settings, trained on their training requests. Raises ValueError for one
    that needs prompts which a workload lacks, and for too few training requests."""
    name = settings.predictor_name
    if name not in FORECASTERS:  # GIVEN is not listed: no command has a workload with forecasts
        require_known("predictor", name, [known for known in FORECASTERS if known != GIVEN])
    forecaster = FORECASTERS[name](settings, workload, answer_tokens)
    if settings.training:
        forecaster.study(_examples(name, settings.training, settings.max_tokens))
    return forecaster


def needs_encoder(predictor: str) -> bool:
    """Whether a sentence encoder reads the prompts first."""
    return predictor in READS and predictor not in ENCODERLESS


def _read(predictor: str, workload: Workload) -> Sequence[Features]:
    """Features of all prompts. Raises ValueError for a workload without prompts."""
    if not workload.prompts:
        add = "" if workload.requests else "add a prompt column to the trace, or "
        raise ValueError(
            f"the predictor {predictor!r} reads prompts, and {workload.name} has none: {add}choose "
            f"a predictor that needs none: {', '.join(PLAIN)}"
        )
    if not needs_encoder(predictor):
        return read_words(workload)
    return workload.features or encode_prompts(workload)


def _examples(predictor: str, training: Workload, max_tokens: int) -> list[Example]:
    """The training requests with their answers, cut at `max_tokens`."""
    read = predictor in READS
    features = _read(predictor, training) if read else [None] * len(training)
    tokens = training.input_tokens.tolist(), training.output_tokens.tolist()
    return [
        Example(
            Query(MODEL, "", prompt_tokens, max_tokens, each),
            min(output_tokens, max_tokens),
            FinishReason.LENGTH if output_tokens > max_tokens else FinishReason.STOP,
        )
        for each, prompt_tokens, output_tokens in zip(features, *tokens, strict=True)
    ]
