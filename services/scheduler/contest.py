"""A worker's share of a round: who stays, who contends for the rest of it, and who gets it.

Running jobs that would make way stand in one line with the queued ones, each behind those that it
would make way for. The batcher admits a prefix of the line: whoever of the running is in it goes
on, and who is behind it is paused. So the batcher's own rule says how many must go, in the same
round that admits the one they go for, and nobody is paused for nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from services.forecast import Ints
from services.scheduler.jobs import Job, Phase, WorkerJobs


@dataclass(frozen=True)
class Contest:
    """Of one worker, as attached by that link, with so many `places` to run in.

    Where a paused job's KV keeps its memory (`held_fast`), pausing makes room among the places
    only: the batcher is asked about those who have nothing here yet (`fresh`), and all others,
    running or `resting`, hold what they hold.
    """

    link: str
    places: int
    stay: list[Job]
    line: list[Job]
    challenged: dict[str, Job]  # those of the line that run
    resting: dict[str, Job]
    held_fast: bool = False

    @property
    def holders(self) -> list[Job]:
        """Those who hold device memory whatever the batcher says."""
        if not self.held_fast:
            return self.stay
        return [*self.stay, *self.challenged.values(), *self.resting.values()]

    @property
    def asking(self) -> list[Job]:
        """Those for whom there must be memory."""
        return [job for job in self.line if self.is_fresh(job)] if self.held_fast else self.line

    @property
    def most_running(self) -> int:
        """So that the batcher may fill all places but those of `stay`."""
        return self.places + len(self.holders) - len(self.stay)

    def is_fresh(self, job: Job) -> bool:
        return job.request_id not in self.challenged and job.request_id not in self.resting


@dataclass(frozen=True)
class Verdict:
    """Who enters and who is paused; or the line to ask about `again`."""

    enter: list[Job]
    pause: list[Job]
    again: list[Job]


def line_up(queued: Sequence[Job], running: Sequence[Job], makes_way: Ints) -> list[Job]:
    """The queued in their order and, each behind as many as it makes way for, the running; those
    who make way for nobody are not in it."""
    if not makes_way.any():
        return list(queued)
    behind: dict[int, list[Job]] = {}
    for job, place in zip(running, makes_way.tolist(), strict=True):
        if place:
            behind.setdefault(place, []).append(job)
    line: list[Job] = []
    for place, job in enumerate(queued, 1):
        line.append(job)
        line += sorted(behind.get(place, ()), key=lambda job: job.rank.key)
    return line


def contest(
    worker: WorkerJobs,
    queued: Sequence[Job],
    makes_way: Ints,
    resting: Iterable[Job] = (),
    held_fast: bool = False,
) -> Contest:
    """What the worker's running, with how many of the queued each makes way for, come to."""
    running = list(worker.running.values())
    yielding = {r.request_id: r for r, n in zip(running, makes_way.tolist(), strict=True) if n}
    return Contest(
        worker.link,
        worker.view.max_running,
        [job for job in running if job.request_id not in yielding],
        line_up(queued, running, makes_way),
        yielding,
        {job.request_id: job for job in resting},
        held_fast,
    )


def renewed(contest: Contest, line: Sequence[Job]) -> Contest:
    """The same with a shorter line."""
    return replace(contest, line=list(line))


def settle(contest: Contest, admit: int, current: Callable[[Job], bool]) -> Verdict:
    """What it means that the first `admit` of those asked about were admitted; `current` says
    who still waits or runs as it did when they were."""
    if contest.held_fast:
        return _settle_places(contest, admit, current)
    admit = min(admit, contest.places - len(contest.stay))
    seated = [job for job in contest.line[:admit] if current(job)]
    enter = [job for job in seated if job.phase is Phase.QUEUED]
    if not contest.challenged:
        return Verdict(enter, [], [])
    beyond = [job for job in contest.line[admit:] if current(job)]
    behind = [job for job in beyond if job.phase is Phase.RUNNING]
    if not enter or not behind:
        return Verdict(enter, [], [])
    if beyond[0].phase is Phase.QUEUED:  # of the running behind it nothing has been said
        return Verdict([], [], seated + behind)
    return Verdict(enter, behind, [])


def _settle_places(contest: Contest, admit: int, current: Callable[[Job], bool]) -> Verdict:
    """Fill the places down the line; who runs there and finds none left is paused."""
    free = contest.places - len(contest.stay)
    verdict = Verdict([], [], [])
    for job in contest.line:
        fresh = contest.is_fresh(job)
        fits = free > 0 and (not fresh or admit > 0)
        admit -= fresh
        if not current(job):
            continue
        if job.request_id in contest.challenged:
            free -= 1
            if not fits:
                verdict.pause.append(job)
        elif fits:
            free -= 1
            verdict.enter.append(job)
    return verdict
