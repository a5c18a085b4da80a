"""A run written down: a head that says what was run, then one line a step, with its time, event
and actions. ReplayedRun through the same `step`, it gives the same actions and the same stories."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, TypeAdapter, ValidationError

from services.policies.preset import Preset
from services.scheduler.core.admission import Limits
from services.scheduler.core.events import Action, Event

log = logging.getLogger(__name__)

FORMAT = 2  # of the lines; another one is not read
MARK = "foretoken_event_log"


@dataclass(frozen=True)
class Head:
    """All that a state is made of. `written_by` is the version that ran."""

    preset: Preset
    limits: Limits
    apart: bool = False
    written_by: str = ""


class Entry(NamedTuple):
    now: float
    event: Annotated[Event, Field(discriminator="kind")]
    actions: list[Annotated[Action, Field(discriminator="kind")]]


_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)


def our_version() -> str:
    try:
        return version("foretoken")
    except PackageNotFoundError:  # run from its folder
        return ""


class EventLog:
    """Appends to a fresh file; past `max_bytes` it stops and says so, for a replay needs the
    beginning more than the end."""

    def __init__(self, path: Path, max_bytes: int, head: Head):
        self._file = path.open("wb")
        self._left = max_bytes
        self._write({MARK: FORMAT, **asdict(head)})

    def append(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        if self._left <= 0:
            return
        self._write(_ENTRY.dump_python(Entry(now, event, list(actions))))
        if self._left <= 0:
            log.warning("event log is full, nothing more is written to %s", self._file.name)

    def _write(self, value: object) -> None:
        line = json.dumps(value, default=dict).encode() + b"\n"  # Python's JSON keeps infinities
        self._left -= len(line)
        self._file.write(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_head(path: Path) -> Head:
    """What was run. Raises ValueError for a file that is no event log, or one of another format,
    and OSError."""
    with path.open("rb") as file:
        first = file.readline(2**20)
    try:
        head = json.loads(first)
    except ValueError:
        head = None
    if not isinstance(head, dict) or MARK not in head:
        raise ValueError(
            f"{path} is no event log of foretoken: its first line is not the head that says which "
            "preset was run; `--set scheduler.event_log=FILE` writes one"
        )
    if head[MARK] != FORMAT:
        raise ValueError(
            f"{path} has format {head[MARK]} of event logs; this version reads {FORMAT}"
        )
    return _decode_head(path, head)


def _decode_head(path: Path, head: Mapping[str, Any]) -> Head:
    written_by = head.get("written_by", "")
    try:
        limits = Limits(**head["limits"])
        return Head(Preset(**head["preset"]), limits, bool(head["apart"]), written_by)
    except (TypeError, KeyError, ValueError) as error:
        by = f" was written by foretoken {written_by} and" if written_by else ""
        raise ValueError(f"{path}{by} can't be replayed here: {error}") from None


def read(path: Path) -> Iterator[Entry]:
    """The steps of a log, in order. A last line that was cut off, as when its process was ended,
    is left out. Raises ValueError as `read_head`, and on a broken line."""
    read_head(path)
    with path.open("rb") as file:
        next(file)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            try:
                yield _ENTRY.validate_python(json.loads(line))
            except (ValueError, ValidationError):
                raise ValueError(f"line {number} of {path} is no step of a scheduler") from None
