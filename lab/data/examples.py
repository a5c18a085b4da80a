"""Converts data set rows to prompts, features, queries and examples."""

from collections.abc import Callable, Mapping, Sequence

from lab.data.rows import Row
from services.core import FinishReason
from services.predictor.encoder.extract import FeatureExtractor
from services.predictor.interface import Example, Features, Prompt, Query

BATCH = 64

FeaturesByPrompt = Mapping[Prompt, Features]
ReportProgress = Callable[[str, int, int], None]  # task, items done, items in total


def prompt_of(row: Row) -> Prompt:
    return Prompt("", row.prompt, row.prompt_tokens, row.answers)


def extract_all(
    prompts: Sequence[Prompt], extractor: FeatureExtractor, progress: ReportProgress
) -> list[Features]:
    """Returns the features of each prompt. Equal prompts are extracted once, in batches of similar
    length."""
    unique = sorted(set(prompts), key=lambda p: (len(p.user_input), p.user_input))
    known: dict[Prompt, Features] = {}
    for start in range(0, len(unique), BATCH):
        progress("reading prompts", start, len(unique))
        batch = unique[start : start + BATCH]
        known.update(zip(batch, extractor.extract(batch), strict=True))
    return [known[prompt] for prompt in prompts]


def query_of(row: Row, features: Features | None, max_tokens: int) -> Query:
    """Returns the request of a row; `max_tokens` applies to rows without a cap."""
    max_tokens = row.cap or max_tokens
    return Query(row.model, row.application, row.prompt_tokens, max_tokens, features)


def examples_of(rows: Sequence[Row], features: FeaturesByPrompt, max_tokens: int) -> list[Example]:
    """Returns finished requests in the rows' order, without features for prompts missing in
    `features`."""
    return [
        Example(
            query_of(row, features.get(prompt_of(row)), max_tokens),
            row.output_tokens,
            FinishReason.LENGTH if 0 < row.cap <= row.output_tokens else FinishReason.STOP,
        )
        for row in rows
    ]
