"""An event log: a header that says which preset ran, then one line per step with its time, event,
actions and transitions. Replaying the events gives the same actions and the same stories.
"""

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, get_args

from pydantic import TypeAdapter, ValidationError

from services.policies.preset import Preset
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.phases import Transition

log = logging.getLogger(__name__)

FORMAT = 4  # of the lines; no other format is read
MARK = "foretoken_event_log"


@dataclass(frozen=True)
class Head:
    """Everything that a state is constructed from. `written_by` is the foretoken version."""

    preset: Preset
    limits: SchedulerLimits
    apart: bool = False
    written_by: str = ""


@cache
def _adapters() -> Mapping[str, TypeAdapter[Any]]:
    """An encoder for transitions and each type of event and action, by the name in a line."""
    types = (*get_args(ev.Event), *get_args(ev.Action), Transition)
    return {each.__name__: TypeAdapter(each) for each in types}


def _encode(value: ev.Event | ev.Action) -> tuple[str, Any]:
    name = type(value).__name__
    return name, _adapters()[name].dump_python(value)


def _decode(pair: tuple[str, Any]) -> Any:
    name, fields = pair
    return _adapters()[name].validate_python(fields)


def our_version() -> str:
    try:
        return version("foretoken")
    except PackageNotFoundError:  # run from its folder
        return ""


class EventLog:
    """Appends to a new file. At `max_bytes` it stops with a warning: a replay needs the
    beginning."""

    def __init__(self, path: Path, max_bytes: int, head: Head):
        self._file = path.open("wb")
        self._left = max_bytes
        self._write({MARK: FORMAT, **asdict(head)})

    def append(self, step: ev.Step) -> None:
        if self._left <= 0:
            return
        actions = [_encode(action) for action in step.actions]
        self._write((step.now, _encode(step.event), actions, step.transitions))
        if self._left <= 0:
            log.warning("event log %s is full (event_log_max_bytes); it ends here", self._file.name)

    def _write(self, value: object) -> None:
        line = json.dumps(value, default=dict).encode() + b"\n"  # Python's JSON keeps infinities
        self._left -= len(line)
        self._file.write(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def read_head(path: Path) -> Head:
    """Raises ValueError for a file that is not an event log of this format, and OSError."""
    with path.open("rb") as file:
        first = file.readline(2**20)
    try:
        head = json.loads(first)
    except ValueError:
        head = None
    if not isinstance(head, dict) or MARK not in head:
        raise ValueError(
            f"{path} is not a foretoken event log: its first line is not a header with the preset; "
            "`--set scheduler.event_log=FILE` writes an event log"
        )
    if head[MARK] != FORMAT:
        raise ValueError(f"{path} has event log format {head[MARK]}; this version reads {FORMAT}")
    return _decode_head(path, head)


def _decode_head(path: Path, head: Mapping[str, Any]) -> Head:
    written_by = head.get("written_by", "")
    try:
        limits = SchedulerLimits(**head["limits"])
        return Head(Preset(**head["preset"]), limits, bool(head["apart"]), written_by)
    except (TypeError, KeyError, ValueError) as error:
        by = f" was written by foretoken {written_by} and" if written_by else ""
        raise ValueError(f"{path}{by} cannot be replayed by this version: {error}") from None


def read(path: Path) -> Iterator[ev.Step]:
    """The steps of a log, in order. A truncated last line, left by a killed process, is skipped.
    Raises ValueError as `read_head` does, and for a malformed line."""
    read_head(path)
    with path.open("rb") as file:
        next(file)
        for number, line in enumerate(file, 2):
            if not line.endswith(b"\n"):
                return
            try:
                now, event, actions, transitions = json.loads(line)
                changes = [_decode(("Transition", each)) for each in transitions]
                yield ev.Step(_decode(event), now, [_decode(each) for each in actions], changes)
            except (ValueError, TypeError, KeyError, ValidationError):
                raise ValueError(f"line {number} of {path} is not a step of a scheduler") from None
