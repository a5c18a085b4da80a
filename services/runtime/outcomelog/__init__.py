"""The outcome log: a bounded log of finished requests, for the services that learn from them.

A service creates a `Journal` over `open_log(...)`, puts rows, and receives all rows of the log.
"""

from services.runtime.outcomelog.interface import Entry, LogUnavailable, OutcomeLog, Row
from services.runtime.outcomelog.journal import Journal
from services.runtime.outcomelog.opening import open_log

__all__ = ["Entry", "Journal", "LogUnavailable", "OutcomeLog", "Row", "open_log"]
