"""Order → form → place: the pool is cut into batches, then given to workers."""

import numpy as np

from services.forecast import ForecastTable
from services.policies.arrange.share import share_of, whys
from services.policies.decision import Decision, Reason, Whys
from services.policies.form.batches import CUTS
from services.policies.interval import INTERVALS
from services.policies.preset import Preset
from services.policies.snapshot import Contest

NOTES: tuple[str, ...] = ()


def arrange_batches(
    contest: Contest, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """Batches for workers that have none, the fastest first; nobody joins a batch that runs. Each
    worker's batch is cut from what it could hold: beside small workers, who fits only the large
    one is not passed over."""
    jobs, runs = contest.jobs, contest.runs
    lines = {w.number: np.flatnonzero(runs & (jobs.home == w.number)) for w in contest.workers}
    idle = sorted(
        (worker for worker in contest.workers if not len(lines[worker.number])),
        key=lambda worker: -worker.full_speed,
    )
    free = ~runs
    reach = jobs.prompt + jobs.cap
    for worker in idle:
        able = free & (jobs.model == worker.model) & (reach <= worker.reach_tokens)
        batches = CUTS[preset.form].cut(contest, np.flatnonzero(able), worker, preset.params)
        batch = next(batches, None)
        if batch is not None:
            lines[worker.number] = batch
            free[batch] = False
    shares = tuple(
        share_of(contest, worker, preset, line, np.ones(len(line), bool), 0.0, preset.static)
        for worker, line in ((worker, lines[worker.number]) for worker in contest.workers)
    )
    told = [
        whys(contest, np.flatnonzero(~runs & ~free), Reason.ADMITTED),
        whys(contest, np.flatnonzero(free), Reason.IN_BATCH),
    ]
    not_before_s = INTERVALS[preset.interval].ends(contest, preset.params)
    return Decision(
        contest.round,
        shares,
        Whys.joined(told),
        contest.rows,
        contest.jobs.serial,
        not_before_s if not_before_s > contest.now else np.inf,
        not_before_s,
    )
