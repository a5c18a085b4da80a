"""Which predictor forecasts for the scheduler inside vLLM."""

from collections.abc import Callable
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry
from vllm.logger import init_logger
from vllm.tokenizers import cached_tokenizer_from_config

from foretoken.vllm.lengths import Decode, LengthLearner, Lengths, MaxTokens
from foretoken.vllm.metrics.scored_lengths import ScoredLengths
from foretoken.vllm.predictor_link import RemoteLengths
from foretoken.vllm.settings import VllmConfig
from services.policies.preset import Preset
from services.predictor.metrics import AccuracyMetrics
from services.scheduler.observe.metrics import SchedulerMetrics

log = init_logger(f"vllm.{__name__}")


class Forecaster(NamedTuple):
    """`name` is for the log."""

    name: str
    lengths: Lengths


def choose_forecaster(
    preset: Preset,
    settings: VllmConfig,
    model_config: Any,
    metrics: SchedulerMetrics,
    registry: CollectorRegistry,
) -> Forecaster:
    """A predictor service if the settings name one; else the named predictor, or the preset's, in
    this process. Those that need an encoder are replaced by `words`. `metrics` and `registry`
    receive its link, or its accuracy."""
    if address := settings.predictor_address:
        lengths = RemoteLengths(address, read_prompts(model_config), metrics)
        return Forecaster(f"the predictor at {address}", lengths)
    name = settings.predictor or preset.predictor
    if name not in PREDICTORS:
        log.warning(
            "the policy %s is published with forecasts by %s, which is not available inside vLLM; "
            "words replace it",
            preset.name,
            name,
        )
        name = "words"
    accuracy = AccuracyMetrics(registry)
    return Forecaster(name, ScoredLengths(PREDICTORS[name](model_config), accuracy))


def read_prompts(model_config: Any) -> Decode | None:
    """vLLM's tokenizer as a function from token ids to text; None without one, with a warning."""
    if model_config.skip_tokenizer_init:
        log.warning("vLLM has no tokenizer, so forecasts come from recent lengths, not from words")
        return None
    tokenizer = cached_tokenizer_from_config(model_config)
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=True))


# The predictors that run in vLLM's process, by name.
PREDICTORS: dict[str, Callable[[Any], Lengths]] = {
    "words": lambda config: LengthLearner(read_prompts(config)),
    "history": lambda _: LengthLearner(None),
    "max": lambda _: MaxTokens(),
}
