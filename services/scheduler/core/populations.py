"""Live requests by the populations that share a forecast: what the predictor learns and renews."""

import numpy as np

from services.core import MAX_LIVE_ANSWERS, LiveAnswers, Request
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase


def shared_representatives(ledger: Ledger) -> list[Request]:
    """One live request for each population forecast in use."""
    shared = {job.shared_key: job.request for job in ledger.jobs.values()}
    shared.pop("", None)
    return list(shared.values())


def live_answers(ledger: Ledger) -> list[LiveAnswers]:
    """The tokens that live requests have generated, by model and application: an even sample of at
    most MAX_LIVE_ANSWERS. O(live)."""
    board = ledger.board
    rows = np.flatnonzero((board.phase != RequestPhase.NONE) & (board.jobs.output > 0))
    rows = rows[:: max(1, -(-len(rows) // MAX_LIVE_ANSWERS))]
    jobs, output = ledger.jobs_at(rows.tolist()), board.jobs.output[rows].tolist()
    groups: dict[tuple[str, str], list[int]] = {}
    for job, tokens in zip(jobs, output, strict=True):
        groups.setdefault((job.request.model, job.request.application), []).append(tokens)
    return [LiveAnswers(*key, tuple(tokens)) for key, tokens in groups.items()]
