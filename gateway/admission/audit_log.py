"""The audit log: the key, the tokens and the outcome of each request, without its text."""

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import QueueListener, RotatingFileHandler
from pathlib import Path
from queue import Full, Queue
from typing import Self
from urllib.parse import quote

from gateway.admission.caller import Caller
from gateway.config import GatewayConfig
from services.runtime.config import ConfigError

log = logging.getLogger(__name__)

MAX_WAITING = 10_000  # lines that the disk has not taken
MEGABYTE = 1_000_000


class AuditLog:
    """Appends JSON lines to a file in a thread of its own: a slow disk delays no request. Lines
    that the disk does not take are lost, and a warning says so."""

    def __init__(self, path: Path, max_bytes: int, files: int):
        """Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._waiting: Queue[logging.LogRecord] = Queue(MAX_WAITING)
        self._file = _AuditFile(path, maxBytes=max_bytes, backupCount=files - 1, encoding="utf-8")
        self._writer = QueueListener(self._waiting, self._file)
        self._writer.start()

    @classmethod
    def open(cls, config: GatewayConfig) -> Self | None:
        """The log of a gateway; None without a folder. Raises ConfigError."""
        if not config.audit_folder:
            return None
        name = quote(config.gateway_id, safe="") or "gateway"
        path = Path(config.audit_folder).expanduser() / f"{name}.jsonl"
        try:
            return cls(path, config.audit_file_mb * MEGABYTE, config.audit_files)
        except OSError as error:
            raise ConfigError(f"gateway.audit_folder: {path}: {error.strerror}") from None

    def write(self, caller: Caller, what: Mapping[str, object]) -> None:
        """Adds a line with the present time. O(1), without waiting."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": now, "key": caller.key, "request_id": caller.request_id, **what})
        try:
            self._waiting.put_nowait(logging.makeLogRecord({"msg": line}))
        except Full:
            log.warning("the audit log loses lines: %s is too slow", self._file.baseFilename)

    def close(self) -> None:
        """Writes the lines that wait."""
        self._writer.stop()
        with suppress(OSError):  # a line that the disk has not taken
            self._file.close()


class _AuditFile(RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        log.warning("the audit log loses lines: cannot write to %s", self.baseFilename)
