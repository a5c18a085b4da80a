"""Whether the ledger, the board and the workers agree. For use after an error, and in tests."""

from collections.abc import Iterator

import numpy as np

from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase


def find_breach(ledger: Ledger) -> str:
    """The first thing that does not agree, in words; empty if everything does. O(rows)."""
    return next((says for agrees, says in _checks(ledger) if not agrees), "")


def _checks(ledger: Ledger) -> Iterator[tuple[bool, str]]:
    board, jobs = ledger.board, list(ledger.jobs.values())
    rows = [job.row for job in jobs]
    live = np.flatnonzero(board.phase).tolist()
    yield sorted(rows) == live, "live requests and live rows differ"
    yield [*ledger.jobs_at(rows)] == jobs, "rows have other requests than the ledger"
    yield board.names[rows].tolist() == [*ledger.jobs], "rows have other names than the ledger"
    free = len(board.phase) - len(rows)
    yield board.free_rows == free, "a row is neither live nor free"
    known = board.forecasts_in_use
    yield len(board.forecasts) == known, "forecasts are kept that no request has"
    runs = sorted(j.request_id for j in jobs if ledger.phase(j) is RequestPhase.RUNNING)
    running = sorted(name for worker in ledger.workers.values() for name in worker.running)
    yield running == runs, "workers have other running requests than the board"
    yield ledger.running == len(runs), "the count of running requests is wrong"
    waiting = sum(map(ledger.waiting_for, {job.request.model for job in jobs}))
    yield waiting == ledger.waiting, "the count of waiting requests is wrong"
    asking = {job.request_id for job in jobs if job.request.include_forecast}
    yield asking == set(ledger.with_forecast), "other requests receive forecasts than ask for them"
    for name, worker in ledger.workers.items():
        here = {job.request_id for job in ledger.jobs_with_home(worker)}
        theirs = worker.running.keys() | worker.pausing.keys()
        yield theirs <= here, f"worker {name} has requests that are not at home there"
