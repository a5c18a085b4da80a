"""A progress bar on stderr, while a command works on a terminal."""

from rich.console import Console
from rich.progress import Progress, ProgressColumn


class ProgressBar(Progress):
    """A bar of one row with these columns, or rich's default ones; a context manager."""

    def __init__(self, first_task: str, *columns: ProgressColumn):
        console = Console(stderr=True, highlight=False)
        super().__init__(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._row = self.add_task(first_task, total=None)
        self._stage = ""

    def show(self, text: str, done: int, total: int, stage: str = "") -> None:
        """Shows `done` of `total`, 0 if unknown. A new `stage` restarts the time estimate."""
        if stage != self._stage:
            self._stage = stage
            self.reset(self._row)
        self.update(self._row, description=text, completed=done, total=total or None)
