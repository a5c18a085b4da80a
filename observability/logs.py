"""Logs: one line per record, as text or JSON. A repeated warning is logged once, and then with its
count.

Lines carry the request and the trace that they concern, if known: set by `about` for the rest of
the task that serves it, or given with one record as `extra={"request_id": …}`.
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
MAX_REMEMBERED = 512  # warnings; format string, words, last line and traceback: 3 MB at most
MAX_CHARS = 1_000  # of each that are compared and kept
MOST_TRACE_CHARS = 3_000
MAX_SIMILAR = 16  # warnings of one format string that are distinguished by their words
CONTEXT = ("request_id", "trace_id", "x_request_id", "key")
NOTHING_KNOWN = ("",) * len(CONTEXT)
TRACE_ID_DIGITS = 32
REPEATED = "repeated"  # record attribute: how many similar records its line stands for

_PLAIN = logging.Formatter()
_about: ContextVar[tuple[str, ...]] = ContextVar("about", default=NOTHING_KNOWN)


def about(request_id: str = "", trace_id: str = "") -> None:
    """This task's later log lines concern that request or trace; omitted values stay."""
    request_before, trace_before, *others = _about.get()
    _about.set((request_id or request_before, trace_id or trace_before, *others))


def about_anew(x_request_id: str, key: str) -> None:
    """This task's later log lines concern the request with this client id and key name; earlier
    values are cleared."""
    _about.set(("", "", x_request_id, key))


@contextmanager
def log_context(request_id: str, traceparent: str) -> Iterator[None]:
    """Log lines within the block concern that request, served under that traceparent. For loops
    that serve many requests; no task or timer that outlives the block may be started within,
    because it would keep the context."""
    token = _about.set(_about.get())
    about(request_id, trace_id_of(traceparent))
    try:
        yield
    finally:
        _about.reset(token)


def trace_id_of(traceparent: str) -> str:
    """The 32 hex digits of a W3C traceparent; empty if it is invalid."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 and len(parts[1]) == TRACE_ID_DIGITS else ""


def set_up_logging(
    service: str, level: str = "INFO", lines: LineFormat = "text", repeat_s: float = REPEAT_S
) -> None:
    """Sends all log records of this process to stderr, under the service's name."""
    handler = LogHandler(sys.stderr, RepeatFilter(repeat_s))
    handler.setFormatter(JsonLines(service) if lines == "json" else TextLines(service))
    logging.basicConfig(level=level, handlers=[handler], force=True)


@dataclass(slots=True)
class _LoggedWarning:
    """A warning since it was last logged."""

    at_s: float
    trace: str  # of the first record, its end
    more: int = 0
    last: logging.LogRecord | None = None


class RepeatFilter:
    """Decides which records are logged, and how many similar ones each stands for.

    Warnings are similar if they have the same logger, level and words, as far as these are
    compared; with an exception, the same format string and exception, raised at the same line. The
    first is logged. Those that follow within `every_s` are counted, and the last of them is logged
    with the count, and with the first one's traceback, when that time is over: with the next
    record, or when `due` is called. Of one format string MAX_SIMILAR are distinguished; any others
    count as similar. Logged lines and counts add up to all records. O(1) per record, besides its
    words and an exception's depth.
    """

    def __init__(self, every_s: float = REPEAT_S, most: int = MAX_REMEMBERED):
        self._every_s = every_s
        self._most = most
        self._logged: OrderedDict[_SimilarityKey, _LoggedWarning] = OrderedDict()  # oldest first
        self._similar_counts: Counter[_Template] = Counter()  # of the remembered warnings
        self._unlogged = 0  # remembered warnings with an unlogged count

    @property
    def due_s(self) -> float:
        """When something is due, on the records' clock; infinite without unlogged counts.
        O(remembered) otherwise."""
        if not self._unlogged:
            return inf
        return next(logged.at_s for logged in self._logged.values() if logged.more) + self._every_s

    def filter(self, record: logging.LogRecord) -> list[logging.LogRecord]:
        """The records to log now that this one has arrived."""
        if record.levelno < logging.WARNING:
            return [*self.due(record.created), record]
        key = self._similarity_key(record)
        logged = self._logged.get(key)
        if logged and record.created - logged.at_s < self._every_s:
            self._unlogged += not logged.more
            logged.more += 1
            logged.last = _kept(record, logged.trace)
            return self.due(record.created)
        record.__dict__[REPEATED] = logged.more if logged else 0
        if logged:
            self._forget(key)
        due = self.due(record.created)
        self._remember(key, _LoggedWarning(record.created, _trace(record)[-MOST_TRACE_CHARS:]))
        if len(self._logged) > self._most:
            due += _summed(self._forget(next(iter(self._logged))))
        return [*due, record]

    def due(self, now_s: float) -> list[logging.LogRecord]:
        """Summaries whose time is over. One that is logged again becomes due again."""
        due: list[logging.LogRecord] = []
        while self._logged:
            key, logged = next(iter(self._logged.items()))
            if now_s - logged.at_s < self._every_s:
                break
            self._forget(key)
            if logged.more:
                due += _summed(logged)
                self._remember(key, _LoggedWarning(now_s, logged.trace))
        return due

    def rest(self) -> list[logging.LogRecord]:
        """All unlogged summaries; forgets everything."""
        return [record for key in [*self._logged] for record in _summed(self._forget(key))]

    def _similarity_key(self, record: logging.LogRecord) -> "_SimilarityKey":
        template = record.name, record.levelno, str(record.msg)[:MAX_CHARS]
        key = (*template, _words(record))
        if key in self._logged or self._similar_counts[template] < MAX_SIMILAR:
            return key
        return (*template, "")

    def _remember(self, key: "_SimilarityKey", logged: _LoggedWarning) -> None:
        self._logged[key] = logged
        self._similar_counts[key[:3]] += 1

    def _forget(self, key: "_SimilarityKey") -> _LoggedWarning:
        logged = self._logged.pop(key)
        self._unlogged -= logged.more > 0
        self._similar_counts[key[:3]] -= 1
        if not self._similar_counts[key[:3]]:
            del self._similar_counts[key[:3]]
        return logged


_Template = tuple[str, int, str]  # logger, level, format string
# With the words; these are empty for records that are not distinguished.
_SimilarityKey = tuple[str, int, str, str]


def _words(record: logging.LogRecord) -> str:
    """What distinguishes a record from others with its format string."""
    kind, _, frames = record.exc_info or (None, None, None)
    if kind is None:
        return record.getMessage()[:MAX_CHARS]
    if frames is None:
        return kind.__name__
    while frames.tb_next:
        frames = frames.tb_next
    return f"{kind.__name__} {frames.tb_frame.f_code.co_filename}:{frames.tb_lineno}"


def _trace(record: logging.LogRecord) -> str:
    """Its traceback, stored in it as formatters do; empty without one."""
    if record.exc_info and record.exc_info[0] and not record.exc_text:
        record.exc_text = _PLAIN.formatException(record.exc_info)
    return record.exc_text or ""


def _kept(record: logging.LogRecord, trace: str) -> logging.LogRecord:
    """The record as plain text, without references to arguments or frames."""
    words = {"msg": record.getMessage()[:MAX_CHARS], "args": None, "exc_info": None}
    kept = {**record.__dict__, **words, "exc_text": trace or None, "stack_info": None}
    return logging.makeLogRecord(kept)


def _summed(logged: _LoggedWarning) -> list[logging.LogRecord]:
    if logged.last is None:
        return []
    logged.last.__dict__[REPEATED] = logged.more - 1
    return [logged.last]


class LogHandler(logging.StreamHandler[TextIO]):
    """Logs what `RepeatFilter` returns, due summaries by its own timer, and the rest at its end."""

    def __init__(self, stream: TextIO, repeats: RepeatFilter):
        super().__init__(stream)
        self._repeats = repeats
        self._timer: threading.Timer | None = None  # while a summary is pending

    def emit(self, record: logging.LogRecord) -> None:
        for name, known in zip(CONTEXT, _about.get(), strict=True):
            if known and not hasattr(record, name):
                setattr(record, name, known)
        try:
            logged = self._repeats.filter(record)
        except Exception:  # a format string that does not match its arguments
            self.handleError(record)
            return
        self._write(logged)

    def close(self) -> None:
        self.acquire()
        try:
            self._write(self._repeats.rest())
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
            self._timer = threading.Timer(max(0.0, due_s - time.time()), self._say_due)
            self._timer.daemon = True
            try:
                self._timer.start()
            except RuntimeError:  # the process exits, and its end logs the rest
                self._timer = None

    def _say_due(self) -> None:
        self.acquire()
        try:
            if self._timer is not None:  # otherwise it was closed meanwhile
                self._timer = None
                self._write(self._repeats.due(time.time()))
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
    """JSON: one object per line; unknown fields are omitted."""

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
    """How many similar records the line stands for."""
    return int(getattr(record, REPEATED, 0))
