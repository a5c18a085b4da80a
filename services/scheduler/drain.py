"""How long until the queue is empty: what Retry-After says."""

from collections.abc import Iterable

from services.scheduler.jobs import Job, WorkerJobs

UNKNOWN_S = 1.0  # nothing attached or measured yet: ask again soon
LONGEST_S = 600.0


def drain_s(queue: Iterable[Job], workers: Iterable[WorkerJobs]) -> float:
    """Tokens still to be made before the last queued request starts, over the fleet's rate.

    Each worker is taken to go on at its present concurrency (or one) and context; a lower bound
    when memory keeps requests out. O(queue + running).
    """
    rate, ahead = 0.0, sum(job.mean_remaining for job in queue)
    for worker in workers:
        seqs = max(1, len(worker.running))
        context = worker.held_tokens / seqs
        rate += worker.cost.decode_tokens_per_s(seqs, context)
        ahead += sum(job.mean_remaining for job in worker.running.values())
    if rate <= 0:
        return UNKNOWN_S
    return min(LONGEST_S, max(UNKNOWN_S, ahead / rate))
