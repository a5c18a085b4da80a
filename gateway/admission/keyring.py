"""The API keys of a server: those of its settings, and those of a file that may change."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.types.api_keys import (
    KeyFault,
    NamedHash,
    Unauthenticated,
    find_name,
    name_keys,
    read_key_file,
)
from services.runtime.config import ConfigError

log = logging.getLogger(__name__)

CHECK_INTERVAL_S = 1.0  # between two checks of the file, at any request rate
MAX_FILE_BYTES = 2**20  # about 10,000 keys

FileStamp = tuple[int, int, int]


class Keyring:
    """Finds the name of a key. A changed file is read again by the first request at least a second
    after the last check. An unreadable or invalid file leaves the keys unchanged and logs a
    warning.

    Raises ConfigError for keys or a file that are invalid at start.
    """

    def __init__(
        self, keys: Sequence[str] = (), path: str = "", clock: Callable[[], float] = time.monotonic
    ):
        self._clock = clock
        self._checked_s = clock()
        self._path = Path(path) if path else None
        self._stamp = _file_stamp(self._path)
        self._configured = _or_config_error("api_keys", lambda: name_keys(keys))
        self._from_file = _or_config_error("api_key_file", self._read_file)
        if self._path and not self._from_file:
            log.warning(
                "%s contains no key: every request is refused; add a line of `foretoken key NAME`",
                path,
            )

    @property
    def required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._path or self._configured)

    def check(self, key: str) -> str:
        """The key's name; empty if none is required. Raises Unauthenticated. O(keys)."""
        if not self.required:
            return ""
        self._refresh()
        name = find_name(key, (*self._configured, *self._from_file)) if key else ""
        if not name:
            raise Unauthenticated(key)
        return name

    def _refresh(self) -> None:
        now_s = self._clock()
        if self._path is None or now_s - self._checked_s < CHECK_INTERVAL_S:
            return
        self._checked_s = now_s
        stamp = _file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = self._read_file()
            log.info("%s has changed: %d keys read", self._path, len(self._from_file))
        except KeyFault as fault:
            log.warning("the API keys stay unchanged: %s", fault)

    def _read_file(self) -> Sequence[NamedHash]:
        if self._path is None:
            return ()
        try:
            with self._path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise KeyFault(f"is larger than {MAX_FILE_BYTES} bytes")
            return read_key_file(raw.decode())
        except KeyFault as fault:
            raise KeyFault(f"{self._path}: {fault}") from None
        except UnicodeDecodeError:
            raise KeyFault(f"{self._path}: is not a text file") from None
        except OSError as error:
            raise KeyFault(f"{self._path}: cannot be read: {error.strerror}") from None


def _file_stamp(path: Path | None) -> FileStamp | None:
    """Changes whenever the file does; None without a file."""
    try:
        found = path.stat() if path else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None


def _or_config_error(setting: str, keys: Callable[[], Sequence[NamedHash]]) -> Sequence[NamedHash]:
    try:
        return keys()
    except KeyFault as fault:
        raise ConfigError(f"gateway.{setting}: {fault}") from None
