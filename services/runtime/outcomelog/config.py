"""Settings of the outcome log, shared by the services that learn from it."""

from typing import ClassVar

from pydantic import Field

from services.runtime.config import Listed, Settings
from services.runtime.outcomelog.interface import OutcomeLog
from services.runtime.outcomelog.opening import open_log

# In memory a row is read once, soon after it is written: a few pages suffice.
MEMORY_ROWS = 1_024


class LogConfig(Settings):
    """Section `log`."""

    section: ClassVar[str] = "log"

    # Empty: in memory, lost at a restart. A file: SQLite, shared by the processes of this host.
    # redis://[user:password@]host[:port][/database]: shared by the replicas of a cluster.
    path: str = ""
    # More than any learner keeps, so that a restart loses nothing. A row with the features of a
    # prompt has about 5 kB: 250 MB in total.
    rows_max: int = Field(default=50_000, ge=1)
    # Whether to store prompts, which are private. Learning needs only embeddings and lengths.
    keep_text: bool = False
    # Names of API keys, and of schedulers and pickers that reported outcomes: what came from them
    # stays in the log and is not learned from.
    leave_out: Listed = ()

    def open(self) -> OutcomeLog:
        """Raises ValueError if the log cannot be opened."""
        return open_log(self.path, self.rows_max if self.path else MEMORY_ROWS)
