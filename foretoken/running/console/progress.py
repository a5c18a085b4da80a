"""Shows the progress of a start: a line per stage, or one changing line on a terminal."""

import sys

from rich.console import Console
from rich.status import Status

from foretoken.running.console.lines import print_line
from services.runtime.startup import UP


class StartProgress:
    """Reports the stages of this process and its children until `close`, each stage once."""

    def __init__(self) -> None:
        self._reported: set[tuple[str, str]] = set()
        self._current: dict[str, str] = {}  # stage by process
        self._status: Status | None = None
        self._closed = False
        if sys.stderr.isatty():
            self._status = Console(stderr=True).status("starting")
            self._status.start()

    def report(self, stage: str) -> None:
        """Reports a stage of this process."""
        self.update("", stage)

    def update(self, name: str, stage: str) -> None:
        """Reports a stage of a child; `UP` ends its start."""
        if self._closed:
            return
        if stage == UP:
            self._current.pop(name, None)
        else:
            self._current[name] = f"{name}: {stage}" if name else stage
        if self._status is not None:
            self._status.update(" · ".join(self._current.values()) or "starting")
        elif stage != UP and (name, stage) not in self._reported:
            self._reported.add((name, stage))
            print_line(self._current[name])

    def close(self) -> None:
        """Stops reporting."""
        self._closed = True
        if self._status is not None:
            self._status.stop()
            self._status = None
