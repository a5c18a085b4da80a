"""Logs: one line a record, for people or as JSON. A warning that repeats is said once, and then
with its count.

Lines carry the request and the trace that they are about, where that is known: told by `about` for
the rest of the task that serves it, or given with one record as `extra={"request_id": …}`.
"""

import json
import logging
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf
from typing import Literal, TextIO

LineFormat = Literal["text", "json"]

REPEAT_S = 60.0
MOST_REMEMBERED = 512  # warnings; format string, words, last line and traceback: 3 MB at most
MOST_CHARS = 1_000  # of each that are compared, and kept
MOST_TRACE_CHARS = 3_000
MOST_ALIKE = 16  # warnings of one format string that are told apart by their words
CONTEXT = ("request_id", "trace_id", "x_request_id", "key")
NOTHING_KNOWN = ("",) * len(CONTEXT)
TRACE_ID_DIGITS = 32
REPEATED = "repeated"  # of a record: how many more like it its line stands for

_PLAIN = logging.Formatter()
_about: ContextVar[tuple[str, ...]] = ContextVar("about", default=NOTHING_KNOWN)


def about(request_id: str = "", trace_id: str = "") -> None:
    """What this task logs from here on is about that request, or trace; what is left out stays."""
    request_before, trace_before, *others = _about.get()
    _about.set((request_id or request_before, trace_id or trace_before, *others))


def about_anew(x_request_id: str, key: str) -> None:
    """What this task logs from here on is about what a client calls so, who has the key of that
    name; nothing of what was known before is."""
    _about.set(("", "", x_request_id, key))


@contextmanager
def concerning(request_id: str, traceparent: str) -> Iterator[None]:
    """What is logged within is about that request, served under that traceparent, and what comes
    after is not. For loops that serve many; nothing may be begun within that outlives it, as tasks
    and timers keep what they were begun under."""
    token = _about.set(_about.get())
    about(request_id, trace_id_of(traceparent))
    try:
        yield
    finally:
        _about.reset(token)


def trace_id_of(traceparent: str) -> str:
    """32 hex digits of a W3C traceparent; empty where it is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == TRACE_ID_DIGITS else ""


def set_up_logging(
    service: str, level: str = "INFO", lines: LineFormat = "text", repeat_s: float = REPEAT_S
) -> None:
    """All that this process logs goes to stderr, in the service's name."""
    handler = LogHandler(sys.stderr, Repeats(repeat_s))
    handler.setFormatter(JsonLines(service) if lines == "json" else TextLines(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@dataclass(slots=True)
class _Said:
    """A warning since it was said last."""

    at_s: float
    trace: str  # of the first, the end of it
    more: int = 0
    last: logging.LogRecord | None = None


class Repeats:
    """Which records are said, and how many more like it each stands for.

    A warning or worse is like another of the same logger, level and words, as far as they are
    compared; one with an exception, of the same format string and exception, raised in the same
    line. The first is said; those that follow within `every_s` are counted, and the last of them
    is said with the count, and with the first one's traceback, once that time is over: with the
    next record, or by who asks what is `due`. Of one format string MOST_ALIKE are told apart, and
    what else comes of it is like one another. What a line says and what it stands for add up to
    all there were. O(1) a record, beside its words and an exception's depth.
    """

    def __init__(self, every_s: float = REPEAT_S, most: int = MOST_REMEMBERED):
        self._every_s = every_s
        self._most = most
        self._said: OrderedDict[_Likeness, _Said] = OrderedDict()  # oldest first
        self._alike: Counter[_Template] = Counter()  # of what is remembered
        self._unsaid = 0  # of what is remembered, those with more to say

    @property
    def due_s(self) -> float:
        """When something is due, as records tell the time; infinite while nothing is unsaid.
        O(what is remembered) otherwise."""
        if not self._unsaid:
            return inf
        return next(said.at_s for said in self._said.values() if said.more) + self._every_s

    def take(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """What is to be said now that this has come."""
        if record.levelno < logging.WARNING:
            return [*self.due(record.created), record]
        key = self._likeness(record)
        said = self._said.get(key)
        if said and record.created - said.at_s < self._every_s:
            self._unsaid += not said.more
            said.more += 1
            said.last = _kept(record, said.trace)
            return self.due(record.created)
        record.__dict__[REPEATED] = said.more if said else 0
        if said:
            self._forget(key)
        due = self.due(record.created)
        self._remember(key, _Said(record.created, _trace(record)[-MOST_TRACE_CHARS:]))
        if len(self._said) > self._most:
            due += _summed(self._forget(next(iter(self._said))))
        return [*due, record]

    def due(self, now_s: float) -> list[logging.LogRecord]:
        """Summaries of those whose time is over. One that was said again is due once more."""
        due: list[logging.LogRecord] = []
        while self._said:
            key, said = next(iter(self._said.items()))
            if now_s - said.at_s < self._every_s:
                break
            self._forget(key)
            if said.more:
                due += _summed(said)
                self._remember(key, _Said(now_s, said.trace))
        return due

    def rest(self) -> list[logging.LogRecord]:
        """What is still unsaid; nothing is remembered any more."""
        return [record for key in [*self._said] for record in _summed(self._forget(key))]

    def _likeness(self, record: logging.LogRecord) -> "_Likeness":
        template = record.name, record.levelno, str(record.msg)[:MOST_CHARS]
        key = (*template, _words(record))
        if key in self._said or self._alike[template] < MOST_ALIKE:
            return key
        return (*template, "")

    def _remember(self, key: "_Likeness", said: _Said) -> None:
        self._said[key] = said
        self._alike[key[:3]] += 1

    def _forget(self, key: "_Likeness") -> _Said:
        said = self._said.pop(key)
        self._unsaid -= said.more > 0
        self._alike[key[:3]] -= 1
        if not self._alike[key[:3]]:
            del self._alike[key[:3]]
        return said


_Template = tuple[str, int, str]  # logger, level, format string
_Likeness = tuple[str, int, str, str]  # with the words; none for what is not told apart


def _words(record: logging.LogRecord) -> str:
    """What tells a record from others of its format string."""
    kind, _, frames = record.exc_info or (None, None, None)
    if kind is None:
        return record.getMessage()[:MOST_CHARS]
    if frames is None:
        return kind.__name__
    while frames.tb_next:
        frames = frames.tb_next
    return f"{kind.__name__} {frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}"


def _trace(record: logging.LogRecord) -> str:
    """Its traceback, written down with it as formatters do; empty where it has none."""
    if record.exc_info and record.exc_info[0] and not record.exc_text:
        record.exc_text = _PLAIN.formatException(record.exc_info)
    return record.exc_text or ""


def _kept(record: logging.LogRecord, trace: str) -> logging.LogRecord:
    """The record as words alone: neither its arguments nor a traceback's frames are held."""
    words = {"msg": record.getMessage()[:MOST_CHARS], "args": None, "exc_info": None}
    kept = {**record.__dict__, **words, "exc_text": trace or None, "stack_info": None}
    return logging.makeLogRecord(kept)


def _summed(said: _Said) -> list[logging.LogRecord]:
    if said.last is None:
        return []
    said.last.__dict__[REPEATED] = said.more - 1
    return [said.last]


class LogHandler(logging.StreamHandler[TextIO]):
    """Says what `Repeats` lets through, what is due by a timer of its own, and at its end what is
    left."""

    def __init__(self, stream: TextIO, repeats: Repeats):
        super().__init__(stream)
        self._repeats = repeats
        self._timer: threading.Timer | None = None  # while something is unsaid

    def emit(self, record: logging.LogRecord) -> None:
        for name, known in zip(CONTEXT, _about.get(), strict=True):
            if known and not hasattr(record, name):
                setattr(record, name, known)
        try:
            said = self._repeats.take(record)
        except Exception:  # a format string that its arguments don't fit
            self.handleError(record)
            return
        self._say(said)

    def close(self) -> None:
        self.acquire()
        try:
            self._say(self._repeats.rest())
            if self._timer:
                self._timer.cancel()
                self._timer = None
        finally:
            self.release()
        super().close()

    def _say(self, records: Iterable[logging.LogRecord]) -> None:
        for each in records:
            super().emit(each)
        if self._timer is None and (due_s := self._repeats.due_s) < inf:
            self._timer = threading.Timer(max(0.0, due_s - time.time()), self._say_due)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # the process ends, and its end says the rest
                self._timer = None

    def _say_due(self) -> None:
        self.acquire()
        try:
            if self._timer is not None:  # else it was closed meanwhile
                self._timer = None
                self._say(self._repeats.due(time.time()))
        finally:
            self.release()


class TextLines(logging.Formatter):
    """For people: time, service, level, logger, message, and what it is about."""

    def __init__(self, service: str):
        super().__init__(f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if repeated := _repeated(record):
            line += f" (and {repeated} more like it)"
        known = [f"{name}={each}" for name in CONTEXT if (each := getattr(record, name, ""))]
        return f"{line} [{' '.join(known)}]" if known else line


class JsonLines(logging.Formatter):
    """For programs: an object a line; what isn't known is left out."""

    def __init__(self, service: str):
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, str | int] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: each for name in CONTEXT if (each := getattr(record, name, ""))}
        if repeated := _repeated(record):
            line[REPEATED] = repeated
        if trace := _trace(record):
            line["exception"] = trace
        return json.dumps(line, ensure_ascii=False)


def _repeated(record: logging.LogRecord) -> int:
    """How many more like it the line stands for."""
    return int(getattr(record, REPEATED, 0))
