"""Outage: reports the loss of a collector once, not once per batch."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

EXPORTERS = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # logs each failed attempt
QUEUES = "opentelemetry.sdk._shared_internal"  # logs what a full queue drops, and bugs
_QUEUE_FULL = "Queue full"

ClaimsRecord = Callable[[logging.LogRecord], bool]


class _ClaimFilter:
    """One filter per logger for all outages of the process: of several filters, the first that
    drops a record would hide it from the others."""

    def __init__(self, name: str):
        self._logger = logging.getLogger(name)
        # Replaced, never modified: other threads may read it.
        self._claims: tuple[ClaimsRecord, ...] = ()
        self._lock = threading.Lock()

    def add(self, claims: ClaimsRecord) -> None:
        with self._lock:
            if not self._claims:  # inserted first: the library's own filter drops similar records
                self._logger.filters.insert(0, self._filter)
            self._claims = (*self._claims, claims)

    def remove(self, claims: ClaimsRecord) -> None:
        with self._lock:
            self._claims = tuple(each for each in self._claims if each != claims)
            if not self._claims:
                self._logger.removeFilter(self._filter)

    def _filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged: no outage claims it. Every outage sees the record."""
        return [claims(record) for claims in self._claims].count(False) == 0


_EXPORTERS, _QUEUES = _ClaimFilter(EXPORTERS), _ClaimFilter(QUEUES)


class Outage:
    """Whether exports arrive, by signal (traces, metrics). Called from the exporting threads.

    While it exists, the library's log records about exports are consumed here instead of being
    logged; `close` ends that.
    """

    def __init__(self, endpoint: str):
        self._endpoint = endpoint
        self._failing: set[str] = set()
        self._why = "no answer"
        self._overran = False  # the queue overflowed since the last success
        self._lock = threading.Lock()
        self._address = endpoint.rpartition("://")[2]  # as in the library's messages
        _EXPORTERS.add(self._exporters)
        _QUEUES.add(self._queues)

    @property
    def on(self) -> bool:
        return bool(self._failing)

    def sent(self, signal: str, arrived: bool) -> None:
        """Records the result of a batch."""
        with self._lock:
            before = self.on
            (self._failing.discard if arrived else self._failing.add)(signal)
            now = self.on
            overran = self._overran and not now
            self._overran &= now
        if now and not before:
            log.warning(
                "the collector at %s takes no %s (%s): they are dropped until it does, and "
                "requests are served as ever",
                self._endpoint,
                signal,
                self._why,
            )
        elif before and not now:
            log.info("the collector at %s takes what is sent again", self._endpoint)
        elif overran:
            log.warning(
                "spans come faster than the collector at %s takes them: some were dropped",
                self._endpoint,
            )

    def close(self) -> None:
        _EXPORTERS.remove(self._exporters)
        _QUEUES.remove(self._queues)

    def _exporters(self, record: logging.LogRecord) -> bool:
        said = record.getMessage()
        if record.levelno >= logging.ERROR and self._address in said:
            self._why = said
        return False

    def _queues(self, record: logging.LogRecord) -> bool:
        full = str(record.msg).startswith(_QUEUE_FULL)
        self._overran |= full
        return not full
