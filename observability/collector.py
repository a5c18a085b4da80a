"""Outage: logs the loss of an OTLP collector once, not once per batch."""

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)

EXPORTERS = "opentelemetry.exporter.otlp.proto.grpc.exporter"  # logger of failed attempts
QUEUES = "opentelemetry.sdk._shared_internal"  # logger of spans dropped by full queues, and of bugs
_QUEUE_FULL = "Queue full"

ClaimsRecord = Callable[[logging.LogRecord], bool]


class _ClaimFilter:
    """One filter per logger for all outages of the process, so that each outage receives each
    record: the first of several filters to drop a record would hide it from the rest."""

    def __init__(self, name: str):
        self._logger = logging.getLogger(name)
        # Replaced, never modified: other threads may read it.
        self._claims: tuple[ClaimsRecord, ...] = ()
        self._lock = threading.Lock()

    def add(self, claims: ClaimsRecord) -> None:
        with self._lock:
            if not self._claims:  # inserted first: the library's filter drops similar records
                self._logger.filters.insert(0, self._filter)
            self._claims = (*self._claims, claims)

    def remove(self, claims: ClaimsRecord) -> None:
        with self._lock:
            self._claims = tuple(each for each in self._claims if each != claims)
            if not self._claims:
                self._logger.removeFilter(self._filter)

    def _filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged: if no outage claims it."""
        claimed = [claims(record) for claims in self._claims]  # every outage receives the record
        return not any(claimed)


_EXPORTERS, _QUEUES = _ClaimFilter(EXPORTERS), _ClaimFilter(QUEUES)


class Outage:
    """Whether exports succeed, by signal (traces, metrics). Called from the exporting threads.

    Until `close`, replaces the library's log records about exports with its messages.
    """

    def __init__(self, endpoint: str):
        self._endpoint = endpoint
        self._failing: set[str] = set()
        self._reason = "no answer"
        self._overflowed = False  # the queue, since the last success
        self._lock = threading.Lock()
        self._address = endpoint.rpartition("://")[2]  # as in the library's messages
        _EXPORTERS.add(self._claims_export)
        _QUEUES.add(self._claims_overflow)

    def record_export(self, signal: str, succeeded: bool) -> None:
        """Logs the begin and the end of an outage, and spans dropped without one."""
        with self._lock:
            before = bool(self._failing)
            (self._failing.discard if succeeded else self._failing.add)(signal)
            now = bool(self._failing)
            overflowed = self._overflowed and not now
            self._overflowed &= now
        if now and not before:
            log.warning(
                "cannot export %s to the collector at %s (%s); they are dropped until it accepts "
                "them, and requests are served as before",
                signal,
                self._endpoint,
                self._reason,
            )
        elif before and not now:
            log.info("the collector at %s accepts exports again", self._endpoint)
        elif overflowed:
            log.warning(
                "spans were dropped because the collector at %s accepts them too slowly; lower "
                "tracing.sample or raise tracing.queue_spans",
                self._endpoint,
            )

    def close(self) -> None:
        _EXPORTERS.remove(self._claims_export)
        _QUEUES.remove(self._claims_overflow)

    def _claims_export(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if record.levelno >= logging.ERROR and self._address in message:
            self._reason = message
        return True

    def _claims_overflow(self, record: logging.LogRecord) -> bool:
        full = str(record.msg).startswith(_QUEUE_FULL)
        self._overflowed |= full
        return full
