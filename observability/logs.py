"""Logs: one line per record, as text or JSON. A repeated warning is logged once, and then as a
summary with its count.

Lines carry the ids of the request and the trace, if known: set by `add_log_context` for the rest of
the task, or given with one record as `extra={"request_id": …}`.
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
MAX_REMEMBERED = 512  # warnings; format string, text, last line and traceback: 3 MB at most
MAX_CHARS = 1_000  # of a format string or text that are compared and kept
MAX_TRACE_CHARS = 3_000
MAX_SIMILAR = 16  # warnings of one format string that are distinguished by their text
CONTEXT = ("request_id", "trace_id", "x_request_id", "key")
TRACE_ID_DIGITS = 32
REPEATED = "repeated"  # record attribute: the number of similar records that a line summarizes

_PLAIN = logging.Formatter()
_context: ContextVar[tuple[str, ...]] = ContextVar("log_context", default=("",) * len(CONTEXT))


def begin_log_context(x_request_id: str, key: str) -> None:
    """Sets the client's request id and key name for this task's later log lines; clears the other
    ids."""
    _context.set(("", "", x_request_id, key))


def add_log_context(request_id: str = "", trace_id: str = "") -> None:
    """Sets ids for this task's later log lines; omitted ones keep their values."""
    request_before, trace_before, *others = _context.get()
    _context.set((request_id or request_before, trace_id or trace_before, *others))


@contextmanager
def log_context(request_id: str, traceparent: str) -> Iterator[None]:
    """Adds the ids to log lines within the block. For loops that serve many requests. A task or
    timer started within the block keeps the context, so it must end with the block."""
    token = _context.set(_context.get())
    add_log_context(request_id, trace_id_of(traceparent))
    try:
        yield
    finally:
        _context.reset(token)


def trace_id_of(traceparent: str) -> str:
    """The 32 hex digits of a W3C traceparent; empty if it is invalid."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == TRACE_ID_DIGITS else ""


def set_up_logging(
    service: str, level: str = "INFO", lines: LineFormat = "text", repeat_s: float = REPEAT_S
) -> None:
    """Writes all log records of this process to stderr, with the service's name."""
    handler = LogHandler(sys.stderr, RepeatFilter(repeat_s))
    handler.setFormatter(JsonLines(service) if lines == "json" else TextLines(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@dataclass(slots=True)
class _LoggedWarning:
    """A logged warning, and the similar records since."""

    at_s: float
    trace: str  # the end of the first record's traceback
    repeats: int = 0
    last: logging.LogRecord | None = None


class RepeatFilter:
    """Decides which records are logged, and how many similar records each of them summarizes.

    Warnings are similar if logger, level and text (up to MAX_CHARS) are equal; with an exception,
    if the format string, the exception's type and the line that raised it are equal. The first is
    logged, and those that follow within `every_s` are counted. After that time a summary is logged,
    with the next record or when `due` is called: the last of them, with the count and the first
    one's traceback. Of one format string MAX_SIMILAR texts are distinguished; all others count as
    similar. Logged lines and counts add up to all records. Times are of a monotonic clock: a jump
    of the wall clock would hold summaries back. O(1) per record, besides its text and an
    exception's depth.
    """

    def __init__(self, every_s: float = REPEAT_S, max_remembered: int = MAX_REMEMBERED):
        self._every_s = every_s
        self._max_remembered = max_remembered
        self._logged: OrderedDict[_SimilarityKey, _LoggedWarning] = OrderedDict()  # oldest first
        self._similar_counts: Counter[_Template] = Counter()  # of the remembered warnings
        self._pending = 0  # remembered warnings with a summary to log

    @property
    def due_s(self) -> float:
        """The time of the next summary; infinite without one. O(remembered)."""
        if not self._pending:
            return inf
        oldest = next(logged for logged in self._logged.values() if logged.repeats)
        return oldest.at_s + self._every_s

    def filter(self, record: logging.LogRecord, now_s: float) -> list[logging.LogRecord]:
        """The records to log when this one arrives: due summaries, and the record itself unless it
        is a repetition."""
        if record.levelno < logging.WARNING:
            return [*self.due(now_s), record]
        key = self._similarity_key(record)
        logged = self._logged.get(key)
        if logged and now_s - logged.at_s < self._every_s:
            self._pending += not logged.repeats
            logged.repeats += 1
            logged.last = _kept(record, logged.trace)
            return self.due(now_s)
        record.__dict__[REPEATED] = logged.repeats if logged else 0
        if logged:
            self._forget(key)
        due = self.due(now_s)
        self._remember(key, _LoggedWarning(now_s, _trace(record)[-MAX_TRACE_CHARS:]))
        if len(self._logged) > self._max_remembered:
            due += _summary(self._forget(next(iter(self._logged))))
        return [*due, record]

    def due(self, now_s: float) -> list[logging.LogRecord]:
        """The summaries to log by now. Similar records that follow are counted again."""
        due: list[logging.LogRecord] = []
        while self._logged:
            key, logged = next(iter(self._logged.items()))
            if now_s - logged.at_s < self._every_s:
                break
            self._forget(key)
            if logged.repeats:
                due += _summary(logged)
                self._remember(key, _LoggedWarning(now_s, logged.trace))
        return due

    def flush(self) -> list[logging.LogRecord]:
        """All pending summaries; forgets everything."""
        return [record for key in [*self._logged] for record in _summary(self._forget(key))]

    def _similarity_key(self, record: logging.LogRecord) -> "_SimilarityKey":
        template = record.name, record.levelno, str(record.msg)[:MAX_CHARS]
        key = (*template, _distinctive_text(record))
        if key in self._logged or self._similar_counts[template] < MAX_SIMILAR:
            return key
        return (*template, "")

    def _remember(self, key: "_SimilarityKey", logged: _LoggedWarning) -> None:
        self._logged[key] = logged
        self._similar_counts[key[:3]] += 1

    def _forget(self, key: "_SimilarityKey") -> _LoggedWarning:
        logged = self._logged.pop(key)
        self._pending -= logged.repeats > 0
        self._similar_counts[key[:3]] -= 1
        if not self._similar_counts[key[:3]]:
            del self._similar_counts[key[:3]]
        return logged


_Template = tuple[str, int, str]  # logger, level, format string
# With the text; empty for records that are not distinguished by it.
_SimilarityKey = tuple[str, int, str, str]


def _distinctive_text(record: logging.LogRecord) -> str:
    """The text, or the place of the exception, that distinguishes records of one format string."""
    kind, _, frames = record.exc_info or (None, None, None)
    if kind is None:
        return record.getMessage()[:MAX_CHARS]
    if frames is None:
        return kind.__name__
    while frames.tb_next:
        frames = frames.tb_next
    return f"{kind.__name__} {frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}"


def _trace(record: logging.LogRecord) -> str:
    """The record's traceback, cached in the record as formatters do; empty without one."""
    if record.exc_info and record.exc_info[0] and not record.exc_text:
        record.exc_text = _PLAIN.formatException(record.exc_info)
    return record.exc_text or ""


def _kept(record: logging.LogRecord, trace: str) -> logging.LogRecord:
    """The record as plain text, without references to arguments or frames."""
    text = {"msg": record.getMessage()[:MAX_CHARS], "args": None, "exc_info": None}
    kept = {**record.__dict__, **text, "exc_text": trace or None, "stack_info": None}
    return logging.makeLogRecord(kept)


def _summary(logged: _LoggedWarning) -> list[logging.LogRecord]:
    if logged.last is None:
        return []
    logged.last.__dict__[REPEATED] = logged.repeats - 1
    return [logged.last]


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the records that `RepeatFilter` returns; a timer writes due summaries, and `close` the
    pending ones."""

    def __init__(self, stream: TextIO, repeats: RepeatFilter):
        super().__init__(stream)
        self._repeats = repeats
        self._timer: threading.Timer | None = None  # while a summary is pending

    def emit(self, record: logging.LogRecord) -> None:
        for name, known in zip(CONTEXT, _context.get(), strict=True):
            if known and not hasattr(record, name):
                setattr(record, name, known)
        try:
            logged = self._repeats.filter(record, time.monotonic())
        except Exception:  # a format string that does not match its arguments
            self.handleError(record)
            return
        self._write(logged)

    def close(self) -> None:
        self.acquire()
        try:
            self._write(self._repeats.flush())
            if self._timer:
                self._timer.cancel()
                self._timer = None
        finally:
            self.release()
        super().close()

    def _write(self, records: Iterable[logging.LogRecord]) -> None:
        for each in records:
            super().emit(each)
        if self._timer is None and (due_s := self._repeats.due_s) < inf:
            self._timer = threading.Timer(max(0.0, due_s - time.monotonic()), self._write_due)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # the process exits, and `close` writes the summaries
                self._timer = None

    def _write_due(self) -> None:
        self.acquire()
        try:
            if self._timer is not None:  # None: closed since the timer fired
                self._timer = None
                self._write(self._repeats.due(time.monotonic()))
        finally:
            self.release()


class TextLines(logging.Formatter):
    """Text: time, service, level, logger, message, and its context."""

    def __init__(self, service: str):
        super().__init__(f"%(asctime)s {service} %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        line = super().formatMessage(record)
        if repeated := _repeated(record):
            line += f" (and {repeated} more like it)"
        known = [f"{name}={each}" for name in CONTEXT if (each := getattr(record, name, ""))]
        return f"{line} [{' '.join(known)}]" if known else line


class JsonLines(logging.Formatter):
    """JSON: one object per line, without empty fields."""

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
    return int(getattr(record, REPEATED, 0))
