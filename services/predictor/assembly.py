"""Builds the parts of the predictor service from its config and connects them."""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.guarded_forecaster import GuardedForecaster, PureForecaster
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import Extractor, NoEncoder, TextEncoder
from services.predictor.interface import Options, Predictor, Prompt
from services.predictor.learning.learner import OutcomeLearner
from services.predictor.learning.outcomes import OutcomeRecorder
from services.predictor.learning.records import KIND, READ_LATE, VERSION, EncodedBy
from services.predictor.learning.refit_process import run_in_process, run_on_executor
from services.predictor.learning.refitter import Refitter
from services.predictor.learning.rules import DEFAULT_RULES, RULES
from services.predictor.learning.schedule import (
    NO_ENCODER,
    WORDS,
    ReadingMode,
    RefitSchedule,
)
from services.predictor.metrics import PredictorMetrics
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.lengths_file import read_lengths
from services.predictor.predictors import ENCODERLESS, build
from services.predictor.serving.executor import CpuBudgetedExecutor
from services.predictor.serving.forecast_cache import ForecastCache
from services.predictor.serving.forecaster import (
    ForecastQuery,
    PromptReading,
    ReadingResult,
    TwoStageForecaster,
)
from services.predictor.serving.pending import PendingForecasts
from services.predictor.serving.prompt_reader import PromptBatchReader, PromptReadingLoop
from services.runtime.outcomelog import Journal
from services.runtime.outcomelog.config import LogConfig

# Delay between an outcome and learning from it. A poll costs 0.1 ms.
POLL_S = 0.05


def _reading_mode(config: PredictorConfig) -> ReadingMode:
    if config.model not in ENCODERLESS:
        return ReadingMode(config.encoder, False, config.examples, config.refit_interval_s, False)
    interval_s = min(WORDS.interval_s, config.refit_interval_s)
    return replace(WORDS, examples=min(WORDS.examples, config.examples), interval_s=interval_s)


@dataclass(frozen=True)
class Content:
    """Parts that exist only for a predictor that reads prompts. `read` reads a batch on the
    executor."""

    read: Callable[[Sequence[ForecastQuery]], list[PromptReading]]
    reader: PromptReadingLoop
    refitter: Refitter
    executor: CpuBudgetedExecutor


@dataclass(frozen=True)
class Parts:
    """A predictor with the parts that train and judge it."""

    forecaster: GuardedForecaster
    two_stage: TwoStageForecaster
    outcomes: OutcomeRecorder
    learning: OutcomeLearner
    journal: Journal
    content: Content | None


def assemble(
    config: PredictorConfig,
    log: LogConfig,
    metrics: PredictorMetrics,
    on_read: Callable[[ReadingResult], None],
    encoder: TextEncoder | None = None,
) -> Parts:
    """Builds all parts. `on_read` is called with the result of each batch of prompts that was read.

    Loads the sentence encoder when the predictor reads prompts and none is given, which takes
    seconds. Raises ValueError for an unusable predictor, encoder or log.
    """
    mode = _reading_mode(config)
    options = Options(
        window=config.window,
        application_min=config.application_min,
        populations_max=config.populations_max,
        examples=mode.examples,
        neighbours_window=config.neighbours_window,
        similarity_min=config.similarity_min,
        lengths=partial(read_lengths, config.oracle_file, config.max_text_bytes),
        pure=config.pure,
    )
    predictor, encoder_name = _build_predictor(config, options, mode)
    extractor = None
    if isinstance(predictor, ContentPredictor):
        kind = PureForecaster if config.pure else GuardedForecaster
        forecaster = kind(HistoryPredictor(options), predictor)
        extractor = Extractor(encoder or _load(encoder_name, config), config.cache_entries)
    else:
        forecaster = GuardedForecaster(predictor)
    pending, writer = PendingForecasts(config.pending_max), secrets.token_hex(4)
    cpu_share = 1.0 if config.pure else config.cpu_share
    executor = CpuBudgetedExecutor(cpu_share, config.cpu_saved_s)
    two_stage = TwoStageForecaster(
        forecaster,
        pending,
        ForecastCache(config.cache_entries),
        config.unread_max,
        extractor is not None,
        log.keep_text,
        on_read,
        extractor if mode.at_once else None,
    )
    content = None
    if extractor and isinstance(predictor, ContentPredictor):
        batch_reader = PromptBatchReader(extractor, forecaster.read)
        content = Content(
            batch_reader.read,
            PromptReadingLoop(batch_reader, two_stage, executor),
            _make_refitter(predictor, config, mode, metrics, executor),
            executor,
        )
    learning = OutcomeLearner(
        forecaster,
        RULES[config.learn_rule or DEFAULT_RULES.get(config.model, "all")],
        EncodedBy(encoder_name, _shape(extractor)) if extractor else None,
        writer,
        log.leave_out,
        config.examples,
        executor,
        metrics.count_outcomes,
    )
    outcomes = OutcomeRecorder(
        forecaster, pending, two_stage.end, metrics.observe_judged, encoder_name, writer
    )
    kinds = {KIND: VERSION, READ_LATE: VERSION}
    journal = Journal(log.open(), learning.deliver, kinds, poll_s=POLL_S)
    return Parts(forecaster, two_stage, outcomes, learning, journal, content)


def _build_predictor(
    config: PredictorConfig, options: Options, mode: ReadingMode
) -> tuple[Predictor, str]:
    """Returns the predictor and the name of its encoder; the name is empty when it reads no
    prompts."""
    if config.artefact:
        from services.predictor.artefact.pretrained import build_pretrained

        if pretrained := build_pretrained(config.model, options, config.artefact):
            return pretrained
    predictor = build(config.model, options)
    return predictor, mode.encoder if isinstance(predictor, ContentPredictor) else ""


def _load(encoder: str, config: PredictorConfig) -> TextEncoder:
    if encoder == NO_ENCODER:
        return NoEncoder()
    from services.encoder.encoder import Encoder

    return Encoder.load(encoder, config.encoder_cap_tokens)


def _shape(extractor: Extractor) -> tuple[int, ...]:
    """Returns the shape of one part's embedding. An empty prompt needs no encoding."""
    return extractor.extract([Prompt("", "", 0)])[0].instruction.shape


def _make_refitter(
    predictor: ContentPredictor,
    config: PredictorConfig,
    mode: ReadingMode,
    metrics: PredictorMetrics,
    executor: CpuBudgetedExecutor,
) -> Refitter:
    schedule = RefitSchedule(
        mode.interval_s,
        config.refit_examples_min,
        config.refit_new_min,
        config.refit_new_share,
        config.seed,
    )
    in_process = partial(run_in_process, timeout_s=config.refit_timeout_s)
    run = partial(run_on_executor, executor) if mode.on_executor else in_process
    return Refitter(predictor, schedule, run, metrics.count_refit, executor)
