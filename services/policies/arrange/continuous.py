"""Order → place → form: each worker's line, its running in it with the rest, is filled while
memory lasts."""

from dataclasses import replace

import numpy as np

from services.forecast import Ints
from services.forecasttable import ForecastTable
from services.policies.arrange.share import share_of, whys
from services.policies.decision import Decision, Reason, Whys
from services.policies.form.demand import WorkerQueue
from services.policies.form.fill import Filled, fill, fill_places
from services.policies.form.forms import FORMS
from services.policies.interval import INTERVALS
from services.policies.place.places import PLACES
from services.policies.preset import RESIDENCIES, Preset
from services.policies.slice import SLICES
from services.policies.snapshot import NOWHERE, Contest, Worker


def arrange_continuous(
    contest: Contest, forecasts: ForecastTable, preset: Preset, rng: np.random.Generator
) -> Decision:
    """Every worker's share of those who run or could."""
    at = PLACES[preset.place].deal(contest, preset.params)
    shares, told = [], [whys(contest, np.flatnonzero(at == NOWHERE), Reason.NO_WORKER)]
    for worker in contest.workers:
        line = np.flatnonzero(at == worker.number)
        line = line[np.lexsort((~contest.runs[line], contest.line[line]))]
        runs, peak = contest.runs[line], 0.0
        if not runs.all() or (len(line) and FORMS[preset.form].renews):
            filled = _filled(contest, worker, line, forecasts, preset, rng)
            waits = ~runs
            rows, a, b = contest.rows[line[waits]], filled.a[waits], filled.b[waits]
            told.append(Whys(rows, filled.reasons[waits], a, b))
            runs, peak = filled.run, filled.peak
        shares.append(share_of(contest, worker, preset, line, runs, peak))
    not_before_s = INTERVALS[preset.interval].ends(contest, preset.params)
    return Decision(
        contest.round,
        tuple(shares),
        Whys.joined(told),
        contest.rows,
        contest.jobs.serial,
        not_before_s if not_before_s > contest.now else np.inf,
        not_before_s,
    )


def _filled(
    contest: Contest,
    worker: Worker,
    at: Ints,
    forecasts: ForecastTable,
    preset: Preset,
    rng: np.random.Generator,
) -> Filled:
    jobs, runs = contest.jobs.take(at), contest.runs[at]
    here = jobs.home == worker.number  # what one who moves holds elsewhere counts for nothing
    jobs = replace(jobs, held=np.where(here, jobs.held, 0), blocks=np.where(here, jobs.blocks, 0))
    limits = SLICES[preset.slice].limits(contest, worker, at, preset.params)
    queue = WorkerQueue(jobs, runs, limits, worker, forecasts, contest.numbers)
    demand = FORMS[preset.form].demand(queue, preset.params, rng)
    first = int(np.argmin(runs))
    alone = bool(jobs.prompt[first] + jobs.cap[first] <= worker.kv_tokens)
    if RESIDENCIES[preset.residency].held_fast:
        holds = runs | (contest.resting()[at] & here)
        return fill_places(runs, holds, demand, worker.places, alone)
    return fill(runs, demand, worker.places, alone)
