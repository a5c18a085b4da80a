"""The outcome log: finished requests in order, bounded, and followed by the services that learn
from it.

A service builds a `Journal` over `open_log(...)`, puts rows, and receives every row of the log.
"""

from services.runtime.outcomelog.interface import Entry, LogUnavailable, OutcomeLog, Row
from services.runtime.outcomelog.journal import Journal
from services.runtime.outcomelog.opening import open_log

__all__ = ["Entry", "Journal", "LogUnavailable", "OutcomeLog", "Row", "open_log"]
