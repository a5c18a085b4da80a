"""The first half of a round: the queue's head dealt to workers, and who there makes way for it."""

from collections.abc import Iterable, Mapping, Sequence

from services.forecast import Ints
from services.scheduler.contest import Contest, contest
from services.scheduler.jobs import Job, WorkerJobs
from services.scheduler.placement import PLACEMENTS
from services.scheduler.preemption import PREEMPTIONS
from services.scheduler.presets import RESIDENCIES, Preset


def deal(
    preset: Preset,
    head: Sequence[Job],
    queue: Iterable[Job],
    workers: Mapping[str, WorkerJobs],
) -> dict[str, Contest]:
    """A contest for every worker that something is offered to. `queue` is all that waits."""
    yielding = {
        name: int((_makes_way(preset, head[:1], worker) > 0).sum())
        for name, worker in workers.items()
    }
    offers = PLACEMENTS[preset.placement](head, workers, yielding)
    if not RESIDENCIES[preset.residency].held_fast:
        return {
            name: contest(workers[name], offered, _makes_way(preset, offered, workers[name]))
            for name, offered in offers.items()
        }
    return {
        name: _held_fast(preset, name, offered, queue, workers[name])
        for name, offered in offers.items()
    }


def _held_fast(
    preset: Preset, name: str, offered: Sequence[Job], queue: Iterable[Job], worker: WorkerJobs
) -> Contest:
    """With all that rest there in the line, past its places too: they need no more memory, so
    that they can go on where those before them can't begin."""
    resting = [job for job in queue if job.resting and job.home == name]
    line = sorted({*offered, *resting}, key=lambda job: job.rank.key)
    return contest(worker, line, _makes_way(preset, line, worker), resting, held_fast=True)


def _makes_way(preset: Preset, queued: Sequence[Job], worker: WorkerJobs) -> Ints:
    running = list(worker.running.values())
    return PREEMPTIONS[preset.preemption](queued, running, preset.ordering)
