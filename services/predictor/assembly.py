"""Builds the parts of the predictor service from its config and connects them."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.guard import Forecaster, GuardedForecaster, PlainForecaster
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import Extractor, NoEncoder, TextEncoder
from services.predictor.interface import Options, Predictor, Prompt
from services.predictor.learning.learner import OutcomeLearner
from services.predictor.learning.outcomes import OutcomeRecorder
from services.predictor.learning.records import KIND, READ_LATE, VERSION, EncodedBy
from services.predictor.learning.refit_process import run_in_process, run_on_executor
from services.predictor.learning.refitter import RefitSchedule, Refitter
from services.predictor.learning.rules import OWN_RULES, RULES
from services.predictor.metrics import PredictorMetrics
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.lengths_file import read_lengths
from services.predictor.predictors import ENCODERLESS, build
from services.predictor.serving.executor import CpuBudgetedExecutor
from services.predictor.serving.forecast_cache import ForecastCache
from services.predictor.serving.forecaster import ReadingResult, TwoStageForecaster
from services.predictor.serving.pending import PendingForecasts
from services.predictor.serving.prompt_reader import PromptBatchReader, PromptReadingLoop
from services.runtime.outcomelog import Journal
from services.runtime.outcomelog.config import LogConfig

# Delay between an outcome and learning from it. A poll costs 0.1 ms.
POLL_S = 0.05
NO_ENCODER = "none"


@dataclass(frozen=True)
class ReadingMode:
    """How prompts are read and learned from.

    encoder: name of the sentence encoder, or NO_ENCODER.
    at_once: read the prompt before the answer; otherwise in the background.
    examples, interval_s: size of the training set and time between refits.
    here: refit on the executor; otherwise in a separate process.
    """

    encoder: str
    at_once: bool
    examples: int
    interval_s: float
    here: bool


# Fitting the word model to 2,000 examples takes 0.05 s; starting a process would take 2 s.
WORDS = ReadingMode(NO_ENCODER, at_once=True, examples=4_000, interval_s=5.0, here=True)


def _reading_mode(config: PredictorConfig) -> ReadingMode:
    own = ReadingMode(config.encoder, False, config.examples, config.refit_interval_s, False)
    if config.model not in ENCODERLESS:
        return own
    examples = min(WORDS.examples, own.examples)
    return replace(WORDS, examples=examples, interval_s=min(WORDS.interval_s, own.interval_s))


@dataclass(frozen=True)
class Content:
    """Parts that exist only for a predictor that reads prompts."""

    reader: PromptReadingLoop
    refitter: Refitter
    executor: CpuBudgetedExecutor


@dataclass(frozen=True)
class Parts:
    """One predictor with the parts that train and score it."""

    forecaster: Forecaster
    two_stage: TwoStageForecaster
    outcomes: OutcomeRecorder
    learning: OutcomeLearner
    journal: Journal
    content: Content | None


def assemble(
    config: PredictorConfig,
    log: LogConfig,
    metrics: PredictorMetrics,
    changed: Callable[[ReadingResult], None],
    encoder: TextEncoder | None = None,
) -> Parts:
    """Builds all parts. `changed` is called with the result of every batch of prompts that was
    read.

    Loads the sentence encoder when the predictor reads prompts and none is given, which takes
    seconds. Raises ValueError for an unusable predictor, encoder or log.
    """
    mode = _reading_mode(config)
    options = _options(config, mode)
    predictor, reads = _build(config, options, mode)
    extractor = Extractor(encoder or _load(reads, config), config.cache_entries) if reads else None
    forecaster = _forecaster(predictor, options)
    pending, writer = PendingForecasts(config.pending_max), secrets.token_hex(4)
    executor = CpuBudgetedExecutor(config.cpu_share, config.cpu_saved_s)
    two_stage = TwoStageForecaster(
        forecaster,
        pending,
        ForecastCache(config.cache_entries),
        config.unread_max,
        extractor is not None,
        log.keep_text,
        changed,
        extractor if mode.at_once else None,
    )
    content = None
    if (
        extractor
        and isinstance(predictor, ContentPredictor)
        and isinstance(forecaster, GuardedForecaster)
    ):
        reader = PromptReadingLoop(
            PromptBatchReader(extractor, forecaster.read), two_stage, executor
        )
        refitter = _refitter(predictor, config, mode, metrics, executor)
        content = Content(reader, refitter, executor)
    learning = OutcomeLearner(
        forecaster,
        RULES[config.learn_rule or OWN_RULES.get(config.model, "all")],
        EncodedBy(reads, _shape(extractor)) if extractor else None,
        writer,
        config.examples,
        executor,
        partial(_count_learnt, metrics),
    )
    return Parts(
        forecaster,
        two_stage,
        OutcomeRecorder(forecaster, pending, two_stage.end, metrics.judged, reads, writer),
        learning,
        Journal(log.open(), learning.deliver, {KIND: VERSION, READ_LATE: VERSION}, poll_s=POLL_S),
        content,
    )


def _options(config: PredictorConfig, mode: ReadingMode) -> Options:
    return Options(
        window=config.window,
        application_min=config.application_min,
        populations_max=config.populations_max,
        examples=mode.examples,
        neighbours_window=config.neighbours_window,
        similarity_min=config.similarity_min,
        lengths=partial(read_lengths, config.oracle_file, config.max_text_bytes),
    )


def _build(config: PredictorConfig, options: Options, mode: ReadingMode) -> tuple[Predictor, str]:
    """Returns the predictor and the name of its encoder; the name is empty when it reads no
    prompts."""
    if config.artefact and (found := _pretrained(config, options)):
        return found
    predictor = build(config.model, options)
    return predictor, mode.encoder if isinstance(predictor, ContentPredictor) else ""


def _pretrained(config: PredictorConfig, options: Options) -> tuple[ContentPredictor, str] | None:
    from services.predictor.artefact.pretrained import build_pretrained

    return build_pretrained(config.model, options, config.artefact)


def _load(encoder: str, config: PredictorConfig) -> TextEncoder:
    if encoder == NO_ENCODER:
        return NoEncoder()
    from services.predictor.encoder.encoder import Encoder

    return Encoder.load(encoder, config.encoder_cap_tokens)


def _shape(extractor: Extractor) -> tuple[int, ...]:
    """Shape of one part's embedding. An empty prompt needs no encoding."""
    return extractor.extract([Prompt("", "", 0)])[0].instruction.shape


def _forecaster(predictor: Predictor, options: Options) -> Forecaster:
    if not isinstance(predictor, ContentPredictor):
        return PlainForecaster(predictor)
    return GuardedForecaster(predictor, HistoryPredictor(options))


def _refitter(
    predictor: ContentPredictor,
    config: PredictorConfig,
    mode: ReadingMode,
    metrics: PredictorMetrics,
    executor: CpuBudgetedExecutor,
) -> Refitter:
    apart = partial(run_in_process, timeout_s=config.refit_timeout_s)
    pace = RefitSchedule(
        mode.interval_s,
        config.refit_examples_min,
        config.refit_new_min,
        config.refit_new_share,
        config.seed,
    )
    run = partial(run_on_executor, executor) if mode.here else apart
    return Refitter(predictor, pace, run, partial(_count_refit, metrics), executor)


def _count_learnt(metrics: PredictorMetrics, learnt: int, passed_over: int) -> None:
    metrics.outcomes.labels("yes").inc(learnt)
    metrics.outcomes.labels("no").inc(passed_over)


def _count_refit(metrics: PredictorMetrics, result: str, seconds: float) -> None:
    metrics.refits.labels(result).inc()
    metrics.refit_seconds.observe(seconds)
