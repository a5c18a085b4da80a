"""From rows to what predictors read: prompts, features, queries, examples."""

from collections.abc import Callable, Mapping, Sequence

from lab.data.rows import Row
from services.core import FinishReason
from services.predictor.encoder.extract import Extracts
from services.predictor.interface import Example, Features, Prompt, Query

BATCH = 64

Known = Mapping[Prompt, Features]
Tell = Callable[[str, int, int], None]  # what goes on, how many are done, of how many


def prompt_of(row: Row) -> Prompt:
    return Prompt("", row.prompt, _prompt_tokens(row), row.answers)


def extract_all(prompts: Sequence[Prompt], extractor: Extracts, tell: Tell) -> list[Features]:
    """Features of each prompt, equal prompts extracted once; alike in length go together."""
    unique = sorted(set(prompts), key=lambda p: (len(p.user_input), p.user_input))
    known: dict[Prompt, Features] = {}
    for start in range(0, len(unique), BATCH):
        tell("reading prompts", start, len(unique))
        batch = unique[start : start + BATCH]
        known.update(zip(batch, extractor.extract(batch), strict=True))
    return [known[prompt] for prompt in prompts]


def query_of(row: Row, features: Features | None, max_tokens: int) -> Query:
    """The request that the row stands for; `max_tokens` where the row tells no cap."""
    application = row.task.partition("/")[0]
    return Query(row.model, application, _prompt_tokens(row), row.cap or max_tokens, features)


def examples_of(rows: Sequence[Row], features: Known, max_tokens: int) -> list[Example]:
    """Finished requests, in the rows' order; without features where the mapping has none."""
    return [_example(row, features.get(prompt_of(row)), max_tokens) for row in rows]


def _example(row: Row, features: Features | None, max_tokens: int) -> Example:
    cut = 0 < row.cap <= row.output_tokens
    reason = FinishReason.LENGTH if cut else FinishReason.STOP
    return Example(query_of(row, features, max_tokens), row.output_tokens, reason)


def _prompt_tokens(row: Row) -> int:
    return row.input_tokens + row.context_tokens
