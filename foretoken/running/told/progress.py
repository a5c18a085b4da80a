"""What a start is at: a line a stage; on a terminal one line that changes."""

import sys

from rich.console import Console
from rich.status import Status

from foretoken.running.told.lines import say
from services.runtime.startup import UP


class Progress:
    """Stages of ours and of our children, until `close`. A stage is said once."""

    def __init__(self) -> None:
        self._said: set[tuple[str, str]] = set()
        self._now: dict[str, str] = {}  # by who is at it
        self._status: Status | None = None
        self._closed = False
        if sys.stderr.isatty():
            self._status = Console(stderr=True).status("starting")
            self._status.start()

    def say(self, stage: str) -> None:
        """A stage of our own."""
        self.told("", stage)

    def told(self, name: str, stage: str) -> None:
        if self._closed:
            return
        if stage == UP:
            self._now.pop(name, None)
        else:
            self._now[name] = f"{name}: {stage}" if name else stage
        if self._status is not None:
            self._status.update(" · ".join(self._now.values()) or "starting")
        elif stage != UP and (name, stage) not in self._said:
            self._said.add((name, stage))
            say(self._now[name])

    def close(self) -> None:
        """Nothing is said from now on."""
        self._closed = True
        if self._status is not None:
            self._status.stop()
            self._status = None
