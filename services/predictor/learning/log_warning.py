"""What does not work at the outcome log, while forecasts go on."""

from services.predictor.learning.learner import OutcomeLearner
from services.runtime.outcomelog import Journal

# For clients, too: the log of the process has the path and the cause.
UNAVAILABLE = "the outcome log cannot be read or written; outcomes wait in the predictor's memory"
REPLACED = "the outcome log was unusable and was moved aside; a new one was started"
UNREADABLE = "the outcome log has rows that cannot be read; they are skipped"


def find_warning(journal: Journal, learner: OutcomeLearner) -> str:
    """One sentence or several; empty if all is well. O(1)."""
    found = {
        UNAVAILABLE: journal.unavailable,
        REPLACED: journal.replaced,
        UNREADABLE: learner.unreadable > 0 or journal.undeliverable > 0,
    }
    return "; ".join(sentence for sentence, holds in found.items() if holds)
