"""Files that are read again when they change."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from services.runtime.config import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = Sequence[tuple[int, ...]]  # inode, mode, size and time of change of each file


class WatchedFiles(Generic[T]):
    """What `read` makes of the files, as they are now."""

    def __init__(self, paths: Sequence[Path], read: Callable[[], T]):
        """Raises ConfigError if `read` does."""
        self._paths, self._read = paths, read
        self._stamp = _look(paths)
        self._content = read()

    def current(self) -> T:
        """The same object until the content changes. Files that `read` refuses, such as in the
        middle of a change, are ignored until the next change. Costs a `stat` call for each file."""
        stamp = _look(self._paths)
        if stamp != self._stamp:
            self._stamp = stamp
            try:
                content = self._read()
            except ConfigError as error:
                log.warning("the earlier content stays in use: %s", error)
            else:
                if content != self._content:
                    self._content = content
                    log.info("%s has changed", self._paths[0])
        return self._content


def _look(paths: Sequence[Path]) -> Stamp:
    """Empty if a file is missing."""
    try:
        states = [path.stat() for path in paths]
    except OSError:
        return ()
    return [(each.st_ino, each.st_mode, each.st_size, each.st_ctime_ns) for each in states]
