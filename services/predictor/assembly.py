"""Config → the parts of a predictor service, wired to one another."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from services.predictor.blend.content import ContentPredictor
from services.predictor.blend.guard import Foreteller, Guarded, Unguarded
from services.predictor.config import PredictorConfig
from services.predictor.encoder.extract import Extractor, NoEncoder, TextEncoder
from services.predictor.interface import Options, Predictor, Prompt
from services.predictor.learning.learner import Learning
from services.predictor.learning.outcomes import Outcomes
from services.predictor.learning.records import KIND, READ_LATE, VERSION, EncodedBy
from services.predictor.learning.refit_process import run_apart, run_here
from services.predictor.learning.refitter import Pace, Refitter
from services.predictor.learning.rules import OWN_RULES, RULES
from services.predictor.metrics import PredictorMetrics
from services.predictor.models.history import HistoryPredictor
from services.predictor.models.lengths_file import read_lengths
from services.predictor.predictors import ENCODERLESS, build
from services.predictor.serving.executor import Desk
from services.predictor.serving.forecast_cache import Remembered
from services.predictor.serving.forecaster import Cascade, Read
from services.predictor.serving.pending import Pending
from services.predictor.serving.prompt_reader import Eyes, Reader
from services.runtime.outcomelog import Journal
from services.runtime.outcomelog.config import LogConfig

# A look costs a tenth of a millisecond. An outcome is learnt about so long after it came, and
# shared forecasts are renewed with it.
POLL_S = 0.05
NO_ENCODER = "none"


@dataclass(frozen=True)
class Manner:
    """How prompts are read and learnt from: by the encoder of that name, and whether `at_once`; on
    how many examples, how often, and whether `here` or in a process of its own."""

    encoder: str
    at_once: bool
    examples: int
    interval_s: float
    here: bool


# A fit of words takes 0.05 s of 2,000 examples, and a process of its own 2 s to start.
WORDS = Manner(NO_ENCODER, at_once=True, examples=4_000, interval_s=5.0, here=True)


def _manner(config: PredictorConfig) -> Manner:
    own = Manner(config.encoder, False, config.examples, config.refit_interval_s, False)
    if config.model not in ENCODERLESS:
        return own
    examples = min(WORDS.examples, own.examples)
    return replace(WORDS, examples=examples, interval_s=min(WORDS.interval_s, own.interval_s))


@dataclass(frozen=True)
class Content:
    """What only a predictor that reads prompts has."""

    reader: Reader
    refitter: Refitter
    desk: Desk


@dataclass(frozen=True)
class Parts:
    """One predictor with all that teaches and judges it."""

    foreteller: Foreteller
    cascade: Cascade
    outcomes: Outcomes
    learning: Learning
    journal: Journal
    content: Content | None


def assemble(
    config: PredictorConfig,
    log: LogConfig,
    metrics: PredictorMetrics,
    changed: Callable[[Read], None],
    encoder: TextEncoder | None = None,
) -> Parts:
    """Loads an encoder where prompts are read and none is given, which takes seconds. `changed` is
    told what reading has changed.

    Raises ValueError for a predictor, an encoder or a log that cannot be.
    """
    manner = _manner(config)
    options = _options(config, manner)
    predictor, reads = _build(config, options, manner)
    extractor = Extractor(encoder or _load(reads, config), config.cache_entries) if reads else None
    foreteller = _foreteller(predictor, options)
    pending, writer = Pending(config.pending_max), secrets.token_hex(4)
    desk = Desk(config.cpu_share, config.cpu_saved_s)
    cascade = Cascade(
        foreteller,
        pending,
        Remembered(config.cache_entries),
        config.unread_max,
        extractor is not None,
        log.keep_text,
        changed,
        extractor if manner.at_once else None,
    )
    content = None
    if extractor and isinstance(predictor, ContentPredictor) and isinstance(foreteller, Guarded):
        reader = Reader(Eyes(extractor, foreteller.read), cascade, desk)
        refitter = _refitter(predictor, config, manner, metrics, desk)
        content = Content(reader, refitter, desk)
    learning = Learning(
        foreteller,
        RULES[config.learn_rule or OWN_RULES.get(config.model, "all")],
        EncodedBy(reads, _shape(extractor)) if extractor else None,
        writer,
        config.examples,
        desk,
        partial(_count_learnt, metrics),
    )
    return Parts(
        foreteller,
        cascade,
        Outcomes(foreteller, pending, cascade.end, metrics.judged, reads, writer),
        learning,
        Journal(log.open(), learning.deliver, {KIND: VERSION, READ_LATE: VERSION}, poll_s=POLL_S),
        content,
    )


def _options(config: PredictorConfig, manner: Manner) -> Options:
    return Options(
        window=config.window,
        application_min=config.application_min,
        populations_max=config.populations_max,
        examples=manner.examples,
        neighbours_window=config.neighbours_window,
        similarity_min=config.similarity_min,
        lengths=partial(read_lengths, config.oracle_file, config.max_text_bytes),
    )


def _build(config: PredictorConfig, options: Options, manner: Manner) -> tuple[Predictor, str]:
    """The predictor, and the name of the encoder it reads prompts with; empty where it does not."""
    if config.artefact and (found := _pretrained(config, options)):
        return found
    predictor = build(config.model, options)
    return predictor, manner.encoder if isinstance(predictor, ContentPredictor) else ""


def _pretrained(config: PredictorConfig, options: Options) -> tuple[ContentPredictor, str] | None:
    from services.predictor.artefact.pretrained import build_pretrained

    return build_pretrained(config.model, options, config.artefact)


def _load(encoder: str, config: PredictorConfig) -> TextEncoder:
    if encoder == NO_ENCODER:
        return NoEncoder()
    from services.predictor.encoder.encoder import Encoder

    return Encoder.load(encoder, config.encoder_cap_tokens)


def _shape(extractor: Extractor) -> tuple[int, ...]:
    """Of a part's embedding; a prompt without text needs no encoding."""
    return extractor.extract([Prompt("", "", 0)])[0].instruction.shape


def _foreteller(predictor: Predictor, options: Options) -> Foreteller:
    if not isinstance(predictor, ContentPredictor):
        return Unguarded(predictor)
    return Guarded(predictor, HistoryPredictor(options))


def _refitter(
    predictor: ContentPredictor,
    config: PredictorConfig,
    manner: Manner,
    metrics: PredictorMetrics,
    desk: Desk,
) -> Refitter:
    apart = partial(run_apart, timeout_s=config.refit_timeout_s)
    pace = Pace(
        manner.interval_s,
        config.refit_examples_min,
        config.refit_new_min,
        config.refit_new_share,
        config.seed,
    )
    run = partial(run_here, desk) if manner.here else apart
    return Refitter(predictor, pace, run, partial(_count_refit, metrics), desk)


def _count_learnt(metrics: PredictorMetrics, learnt: int, passed_over: int) -> None:
    metrics.outcomes.labels("yes").inc(learnt)
    metrics.outcomes.labels("no").inc(passed_over)


def _count_refit(metrics: PredictorMetrics, result: str, seconds: float) -> None:
    metrics.refits.labels(result).inc()
    metrics.refit_seconds.observe(seconds)
