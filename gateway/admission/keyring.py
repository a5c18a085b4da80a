"""The keys that are good now: those of the config, and those of a file that may change."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from gateway.admission.keys import (
    KeyFault,
    NamedHash,
    Unauthenticated,
    name_keys,
    name_of,
    read_key_file,
)
from services.runtime.config import ConfigError

log = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the file, however many requests come
MAX_FILE_BYTES = 2**20  # some 10,000 keys

Stamp = tuple[int, int, int]


class Keyring:
    """Whose key is whose. A file that changes is read again by the next request a second later;
    one that can't be read or understood then leaves the keys as they are, and a warning says so.

    Raises ConfigError for keys and a file that are not good from the start.
    """

    def __init__(
        self, keys: Sequence[str] = (), path: str = "", clock: Callable[[], float] = time.monotonic
    ):
        self._clock = clock
        self._looked_s = clock()
        self._path = Path(path) if path else None
        self._stamp = _stamp(self._path)
        self._given = _good("api_keys", lambda: name_keys(keys))
        self._filed = _good("api_key_file", self._read)
        if self._path and not self._filed:
            log.warning("%s holds no key yet", path)

    @property
    def wanted(self) -> bool:
        """Whether a key is asked for at all."""
        return bool(self._path or self._given)

    def check(self, key: str) -> str:
        """The name of who has this key; empty where none is wanted. Raises Unauthenticated.
        O(keys)."""
        if not self.wanted:
            return ""
        self._look()
        name = name_of(key, (*self._given, *self._filed)) if key else ""
        if not name:
            raise Unauthenticated(key)
        return name

    def _look(self) -> None:
        now_s = self._clock()
        if self._path is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._filed = self._read()
            log.info("%s was read again: keys of %d", self._path, len(self._filed))
        except KeyFault as fault:
            log.warning("the keys stay as they were: %s", fault)

    def _read(self) -> Sequence[NamedHash]:
        if self._path is None:
            return ()
        try:
            with self._path.open("rb") as file:
                raw = file.read(MAX_FILE_BYTES + 1)
            if len(raw) > MAX_FILE_BYTES:
                raise KeyFault(f"is over {MAX_FILE_BYTES} bytes")
            return read_key_file(raw.decode())
        except KeyFault as fault:
            raise KeyFault(f"{self._path}: {fault}") from None
        except UnicodeDecodeError:
            raise KeyFault(f"{self._path}: is no text") from None
        except OSError as error:
            raise KeyFault(f"{self._path}: cannot be read: {error.strerror}") from None


def _stamp(path: Path | None) -> Stamp | None:
    """What changes when the file does; None where it is not there."""
    try:
        found = path.stat() if path else None
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None


def _good(setting: str, keys: Callable[[], Sequence[NamedHash]]) -> Sequence[NamedHash]:
    try:
        return keys()
    except KeyFault as fault:
        raise ConfigError(f"gateway.{setting}: {fault}") from None
