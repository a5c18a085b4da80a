"""Data sets: prompts with the lengths of real answers.

A file has JSON lines, plain or gzip. Each line has `id`, `prompt`, `model`, `task`, `input_tokens`
and `output_tokens`. Optional fields are `cap` (max_tokens of the run), `turn` and `context_tokens`
of a conversation, and `ref_tokens` (lengths of several answers, the row's first). A line may have
`samples` instead of `output_tokens`: [name, tokens, finished] of several answers.
"""

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

Record = Mapping[str, object]


class DataError(ValueError):
    """A data file cannot be used; the message names the file and line."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data file; `field` names the field with the length, `output_tokens` if empty."""

    path: Path
    field: str = ""

    @property
    def name(self) -> str:
        stem = self.path.name.removesuffix(".gz").removesuffix(".jsonl")
        return f"{stem}:{self.field}" if self.field else stem


@dataclass(frozen=True, slots=True)
class Row:
    """A prompt, the model that answered it, and the length of the answer in tokens.

    answers: earlier answers of the same conversation, oldest first.
    references: lengths of other answers to the same prompt.
    """

    data: str
    id: str
    prompt: str
    model: str
    task: str
    input_tokens: int
    output_tokens: int
    context_tokens: int = 0
    cap: int = 0
    turn: int = 0
    answers: tuple[int, ...] = ()
    references: tuple[int, ...] = ()

    @property
    def application(self) -> str:
        return self.task.partition("/")[0]

    @property
    def prompt_tokens(self) -> int:
        return self.input_tokens + self.context_tokens


def parse_source(spec: str) -> Source:
    """Parses `FILE` or `FILE:field`, where dots select nested fields."""
    path, _, field = spec.rpartition(":")
    if not path or Path(spec).exists():
        return Source(Path(spec))
    return Source(Path(path), field)


def read_rows(source: Source, limit: int = 0, seed: int = 0) -> list[Row]:
    """Returns the rows in file order, or a seeded sample of `limit` rows (0: all).

    Skips empty answers, answers with truncated samples only, and rows without the source's
    field. Raises DataError.
    """
    rows = [row for record in _records(source.path) if (row := _row(source, record)) is not None]
    if not rows:
        wanted = f"the field {source.field!r}" if source.field else "an answer's length"
        raise DataError(f"no row of {source.path} has {wanted}")
    rows = _with_answers(rows)
    if not 0 < limit < len(rows):
        return rows
    chosen = np.random.default_rng(seed).choice(len(rows), limit, replace=False)
    return [rows[i] for i in np.sort(chosen)]


@dataclass(frozen=True, slots=True)
class _Line:
    """A record with its file and line for error messages."""

    where: str
    record: Record

    def error(self, problem: str) -> DataError:
        return DataError(f"{self.where}: {problem}")

    def text(self, key: str) -> str:
        value = self.record.get(key)
        if not isinstance(value, str):
            raise self.error(f"{key!r} must be text")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.record.get(key, default)
        if not _is_count(value):
            raise self.error(f"{key!r} must be a number of tokens, 0 or more")
        return cast(int, value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _records(path: Path) -> Iterator[_Line]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield _Line(f"{path}:{number}", _parsed(f"{path}:{number}", line))
    except FileNotFoundError:
        raise DataError(f"the file {path} does not exist") from None
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def _parsed(where: str, line: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: a row must be a JSON object")
    return record


def _row(source: Source, line: _Line) -> Row | None:
    lengths = _lengths(source, line)
    if not lengths or not lengths[0]:
        return None
    return Row(
        data=source.name,
        id=line.text("id"),
        prompt=line.text("prompt"),
        # A label field holds the answers of another model, a separate population of lengths.
        model=source.field or line.text("model"),
        task=line.text("task"),
        input_tokens=line.count("input_tokens"),
        output_tokens=lengths[0],
        context_tokens=line.count("context_tokens", 0),
        cap=line.count("cap", 0),
        turn=line.count("turn", 0),
        references=tuple(n for n in lengths[1:] if n),
    )


def _lengths(source: Source, line: _Line) -> list[int]:
    """Returns the row's length, then those of other answers; an empty list skips the row."""
    if source.field:
        return _field_lengths(line, line.record, source.field)
    if "output_tokens" in line.record:
        return [line.count("output_tokens"), *_reference_lengths(line)]
    if "samples" in line.record:
        return _finished(line)
    raise line.error("neither 'output_tokens' nor 'samples'")


def _reference_lengths(line: _Line) -> list[int]:
    lengths = line.record.get("ref_tokens", [])
    if not isinstance(lengths, list) or not all(map(_is_count, lengths)):
        raise line.error("'ref_tokens' must be a list of numbers of tokens")
    return lengths[1:]


def _finished(line: _Line) -> list[int]:
    """Returns the lengths of samples that were not truncated. A sample without the third value is
    finished."""
    samples = line.record["samples"]
    try:
        return [int(n) for _, n, *end in cast(list[list[int]], samples) if n > 0 and end != [0]]
    except (TypeError, ValueError):
        raise line.error("'samples' must be a list of [name, tokens, finished]") from None


def _field_lengths(line: _Line, record: Record, field: str) -> list[int]:
    """Returns the value at `field`, then its siblings. Keys may contain dots."""
    if field in record:
        own = _Line(line.where, record).count(field)
        others = (value for key, value in record.items() if key != field and _is_count(value))
        return [own, *cast(Iterator[int], others)]
    head, _, rest = field.partition(".")
    inner = record.get(head)
    return _field_lengths(line, inner, rest) if rest and isinstance(inner, dict) else []


def _with_answers(rows: Sequence[Row]) -> list[Row]:
    """Adds the lengths of earlier answers of the same conversation."""
    lengths_by_turn: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        if row.turn:
            lengths_by_turn[_conversation(row)].append((row.turn, row.output_tokens))
    return [
        _with_earlier_answers(row, lengths_by_turn[_conversation(row)]) if row.turn else row
        for row in rows
    ]


def _conversation(row: Row) -> tuple[str, str]:
    return row.id.rpartition("-")[0], row.model


def _with_earlier_answers(row: Row, lengths_by_turn: Sequence[tuple[int, int]]) -> Row:
    return replace(row, answers=tuple(n for turn, n in sorted(lengths_by_turn) if turn < row.turn))
