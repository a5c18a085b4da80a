"""A run written down: one line a step, with its time, event and actions."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Annotated, NamedTuple, Self

from pydantic import Field, TypeAdapter

from services.scheduler.events import Action, Event

log = logging.getLogger(__name__)


class Entry(NamedTuple):
    now: float
    event: Annotated[Event, Field(discriminator="kind")]
    actions: list[Annotated[Action, Field(discriminator="kind")]]


_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


class EventLog:
    """Appends to a fresh file; past `max_bytes` it stops and says so, for a replay needs the
    beginning more than the end."""

    def __init__(self, path: Path, max_bytes: int):
        self._file = path.open("wb")
        self._left = max_bytes

    def append(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        if self._left <= 0:
            return
        entry = _ENTRY.dump_python(Entry(now, event, list(actions)))
        line = json.dumps(entry).encode() + b"\n"  # Python's own JSON keeps infinities
        self._left -= len(line)
        self._file.write(line)
        if self._left <= 0:
            log.warning("event log is full, nothing more is written to %s", self._file.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Entry]:
    """The entries of a log, in order; raises ValueError on a broken line."""
    with path.open("rb") as file:
        for line in file:
            yield _ENTRY.validate_python(json.loads(line))
