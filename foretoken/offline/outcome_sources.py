"""Counts the outcomes of a log by where they come from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from services.predictor.learning.records import Record

TIMES = {"day": "%Y-%m-%d", "hour": "%Y-%m-%d %H:00"}  # columns, of local time
COLUMNS: Mapping[str, Callable[[Record], str]] = {
    "scheduler": lambda record: record.reporter,
    "key": lambda record: record.key_name,
    "application": lambda record: record.example.query.application,
    "day": lambda record: _format_time(record, TIMES["day"]),
    "hour": lambda record: _format_time(record, TIMES["hour"]),
}


@dataclass(slots=True)
class SourceCount:
    """The outcomes with the same `names`, one for each column."""

    names: tuple[str, ...]
    outcomes: int = 0
    output_tokens: int = 0
    first_s: float = float("inf")
    last_s: float = 0.0

    def add(self, record: Record) -> None:
        self.outcomes += 1
        self.output_tokens += record.example.output_tokens
        self.first_s = min(self.first_s, record.finished_at_s)
        self.last_s = max(self.last_s, record.finished_at_s)


def count_sources(records: Iterable[Record], columns: Sequence[str]) -> list[SourceCount]:
    """The counts by these COLUMNS: the latest times first, then the most outcomes. O(records)."""
    counts: dict[tuple[str, ...], SourceCount] = {}
    for record in records:
        names = tuple(COLUMNS[column](record) for column in columns)
        counts.setdefault(names, SourceCount(names)).add(record)
    times = [index for index, column in enumerate(columns) if column in TIMES]
    return sorted(
        counts.values(),
        key=lambda count: ([count.names[index] for index in times], count.outcomes),
        reverse=True,
    )


def _format_time(record: Record, form: str) -> str:
    return datetime.fromtimestamp(record.finished_at_s).strftime(form)
