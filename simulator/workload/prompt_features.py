"""Features of a workload's prompts, as the served predictor reads them."""

from collections.abc import Callable, Sequence

from services.predictor.encoder.extract import Extractor, word_features
from services.predictor.interface import Features, Prompt
from simulator.workload.workload import Workload

ReadPrompts = Callable[[Workload], Sequence[Features]]
_BATCH = 64  # prompts of one call of the encoder


def encode_prompts(workload: Workload) -> list[Features]:
    """Returns features by the packaged sentence encoder; 6 to 15 ms per distinct prompt. Raises
    ValueError if the encoder is not installed."""
    from services.encoder.encoder import Encoder  # takes seconds to import

    read = _prompts(workload)
    extractor = Extractor(Encoder.load(), cache_entries=2 * len(read))
    return [
        features
        for start in range(0, len(read), _BATCH)
        for features in extractor.extract(read[start : start + _BATCH])
    ]


def read_words(workload: Workload) -> list[Features]:
    """Returns features without embeddings; 0.1 ms per prompt."""
    return [word_features(prompt) for prompt in _prompts(workload)]


def _prompts(workload: Workload) -> list[Prompt]:
    tokens = workload.input_tokens.tolist()
    return [Prompt("", text, count) for text, count in zip(workload.prompts, tokens, strict=True)]
