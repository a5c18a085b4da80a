"""Times static batches, from their admission to the report that ends them."""

from collections.abc import Sequence

from services.core import FinishReason, Report
from services.costs import BatchTiming
from services.scheduler.core.jobs import Job, ServedBatch, WorkerJobs
from services.scheduler.core.ledger import Ledger


def begin_batch(members: Sequence[Job], ledger: Ledger) -> ServedBatch:
    columns = ledger.board.jobs
    rows = [job.row for job in members]
    output = columns.output[rows]
    longest = int((columns.prompt[rows] + output).max())
    before = zip(members, output.tolist(), strict=True)
    begun = {job.request_id: (job, tokens) for job, tokens in before}
    return ServedBatch(ledger.now, len(members), longest, begun)


def pop_ended(worker: WorkerJobs, report: Report, ledger: Ledger) -> list[BatchTiming]:
    """Removes the batches that are over after this report, once the ledger has applied it, and
    returns their timings. A batch is over when every member has ended or used its budget. A batch
    that an eviction, a pause or an error cut short gives no timing, nor does one with nothing but
    cancelled members. O(members)."""
    timings: list[BatchTiming] = []
    finished = {completion.request_id: completion for completion in report.finished}
    columns = ledger.board.jobs
    for batch in list(worker.served):
        for request_id, (job, before) in list(batch.members.items()):
            if ended := finished.get(request_id):
                batch.generated_tokens = max(batch.generated_tokens, ended.output_tokens - before)
                batch.whole &= ended.reason is not FinishReason.ERROR
                del batch.members[request_id]
            elif ledger.jobs.get(request_id) is not job:
                del batch.members[request_id]  # cancelled
            elif request_id not in worker.running:
                batch.whole = False
                del batch.members[request_id]
        left = [(job.row, before) for job, before in batch.members.values()]
        if any(columns.output[row] < columns.limit[row] for row, _ in left):
            continue
        worker.served.remove(batch)
        generated = [int(columns.output[row]) - before for row, before in left]
        longest = max([batch.generated_tokens, *generated])
        if batch.whole and longest:
            elapsed_s = ledger.now - batch.began_s
            timings.append(BatchTiming(batch.seqs, batch.length_tokens, longest, elapsed_s))
    return timings
