"""A progress bar on stderr, while a command or a program works on a terminal."""

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class ProgressBar(Progress):
    """A bar of one row with these columns, or rich's default ones; a context manager. Without
    `shown` nothing is printed."""

    def __init__(self, first_task: str, *columns: ProgressColumn, shown: bool = True):
        console = Console(stderr=True, highlight=False)
        disable = not (shown and console.is_terminal)
        super().__init__(*columns, console=console, transient=True, disable=disable)
        self._row = self.add_task(first_task, total=None)
        self._stage = ""

    def show(self, text: str, done: int, total: int, stage: str = "") -> None:
        """Shows `done` of `total`, 0 if unknown. A new `stage` restarts the time estimate."""
        if stage != self._stage:
            self._stage = stage
            self.reset(self._row)
        self.update(self._row, description=text, completed=done, total=total or None)
