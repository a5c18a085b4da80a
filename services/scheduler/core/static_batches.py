"""Static batches as the scheduler sees them: from their admission to the report that ends them."""

from collections.abc import Sequence

from services.core import FinishReason, Report
from services.costs import BatchTiming
from services.scheduler.core.board import Board
from services.scheduler.core.jobs import Job, Served, WorkerJobs
from services.scheduler.core.ledger import Ledger


def begin(members: Sequence[Job], board: Board, now: float) -> Served:
    """These begin together."""
    rows = [job.row for job in members]
    output = board.jobs.output[rows]
    longest = int((board.jobs.prompt[rows] + output).max())
    had = {job.request_id: (job, made) for job, made in zip(members, output.tolist(), strict=True)}
    return Served(now, len(members), longest, had)


def take_over(worker: WorkerJobs, report: Report, ledger: Ledger, now: float) -> list[BatchTiming]:
    """The times of the batches that are over by this report, which the ledger has taken in: all
    their members have ended, or made what they may. What was cut short by an eviction, a pause or
    an error is no measure, nor one of which everybody was cancelled. O(members)."""
    timings: list[BatchTiming] = []
    finished = {ended.request_id: ended for ended in report.finished}
    for batch in list(worker.served):
        for request_id, (job, had) in list(batch.had.items()):
            if ended := finished.get(request_id):
                batch.generated_tokens = max(batch.generated_tokens, ended.output_tokens - had)
                batch.whole &= ended.reason is not FinishReason.ERROR
                del batch.had[request_id]
            elif ledger.jobs.get(request_id) is not job:
                del batch.had[request_id]  # cancelled
            elif request_id not in worker.running:
                batch.whole = False
                del batch.had[request_id]
        left = [(job.row, had) for job, had in batch.had.values()]
        jobs = ledger.board.jobs
        if any(jobs.output[row] < jobs.limit[row] for row, _ in left):
            continue
        worker.served.remove(batch)
        made = [int(jobs.output[row]) - had for row, had in left]
        most = max([batch.generated_tokens, *made])
        if batch.whole and most:
            elapsed_s = now - batch.began_s
            timings.append(BatchTiming(batch.seqs, batch.length_tokens, most, elapsed_s))
    return timings
