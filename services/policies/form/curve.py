"""The curve rule: at no future time may the forecast memory exceed the capacity, except with a
small probability.

Lengths are independent given their forecasts. The memory of a batch t tokens from now therefore
has a mean and a variance that add up over its members. Both are tabulated at a few times;
nothing is sampled or sorted.

The curve begins at the next plan, as far as `measure_cadence` knows when that is. A worker begins
requests in the order of their admission as memory comes free, without an eviction of earlier ones,
so that requests admitted for the memory of answers that end until then keep the engine full.
Counting from now leaves that memory empty from each end until a plan arrives.

The curve ends where the slices of the batch end, because the next plan may pause a request there.
With whole answers as slices it covers their whole lengths. Under a preemptive order such a plan
reserves memory for tokens that no slice generates: on a new server, where the longest length is
unknown, it costs a third of the throughput.
"""

from dataclasses import dataclass, field

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import After
from services.policies.cadence import steps_to_next_plan
from services.policies.decision import WaitReason
from services.policies.form.demand import (
    ANY,
    Demand,
    Need,
    WorkerQueues,
    count_within,
    needed_tokens,
)
from services.policies.form.in_time import slots_in_time
from services.policies.form.lines import Lines
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Snapshot, distinct, whole_blocks

TIMES = 16  # evaluation times of the curve, in addition to now
POOLED = 512  # candidate end times from which these are chosen
FINEST = 64  # quantiles per job
GOLDEN = 0.6180339887  # its multiples modulo 1 are evenly spread, for any number
DENSE = 8  # whole numbers for each time up to which times are marked
LARGEST_Z = 8.0
Z, SEEN_EVICTIONS, SEEN_ENDINGS = "curve_z", "curve_evictions", "curve_endings"
STEP = 0.1  # change of z per eviction, in standard deviations


@dataclass(frozen=True, slots=True)
class CurveDemand(Demand):
    """`moments`, (2, times, columns), are the mean and the variance of the jobs' memory at each
    time of their queue; with a `z` of 0 without the variance. `columns` are those of the jobs; jobs
    that cannot run next have none. max over times of Σ mean + z · √(Σ variance) must fit. O(times ·
    jobs)."""

    moments: Floats
    z: float
    columns: Ints
    slots_reason: WaitReason = field(default=WaitReason.TOKEN_BUDGETS, kw_only=True)

    def count_fitting(self, lines: Lines, base: Ints, most: Ints) -> tuple[Ints, Need]:
        needs = self._highest(lines.running_sums(self._of(lines)))
        return count_within(lines, needs, self.limits, base, most)

    def able(self, kept: Lines, later: Lines) -> Bools:
        """Exact for this demand."""
        beside = kept.sums(self._of(kept)).take(later.which, axis=2)
        fits: Bools = self._highest(beside + self._of(later)) <= self.limits[later.which]
        return fits

    def _of(self, lines: Lines) -> Floats:
        return self.moments.take(self.columns[lines.jobs], axis=2)

    def _highest(self, moments: Floats) -> Floats:
        total = moments[0]
        if self.z:
            total = total + self.z * np.sqrt(moments[1])
        highest: Floats = total.max(axis=0)
        return highest


def curves(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> Demand:
    """max_t E(t) + z · sd(t) fits in (1 − `reserved`) · capacity from the next plan on, with E = Σ
    m_i p_i and sd² = Σ m_i² p_i (1 − p_i).

    m_i(t) is a job's memory while it makes its t-th token from now, in whole blocks, and p_i(t)
    the probability that it makes that token. From the end of its slice on, both stay as they
    are there, unless it ends there at its cap. With known lengths and whole answers the maximum is
    Past-Future's M*. Every job is assumed to make one token per step. z is `z`, as adjusted by
    feedback. With a `tpot_share`, the steps of a batch take at most that share of the budgets that
    they can keep (`slots_in_time`). O(times · jobs), in one pass over all queues.
    """
    share = params["tpot_share"]
    slots = slots_in_time(queues, share) if share else ANY
    z = queues.numbers.get(Z, params["z"]) if params["eviction_share"] else params["z"]
    limits = (1 - params["reserved"]) * queues.rooms
    jobs, which, held = queues.jobs, queues.lines.which, needed_tokens(queues)
    if not len(jobs):
        return CurveDemand(held, limits, np.zeros((1 + (z > 0), 1, 0)), z, which, slots=slots)
    after = queues.forecasts.after(jobs.forecast, jobs.output, jobs.cap)
    ahead = np.maximum(queues.limits - jobs.output, 1)
    most = np.maximum.reduceat(ahead, queues.lines.starts)
    ends = queues.limits >= jobs.cap
    ahead[ends] = most[which[ends]]  # it ends there, and keeps nothing
    grid, counts = _times(queues, after, most)
    # Row 0 is now. The curve counts from the last time that is not after the next plan: a queue's
    # earlier rows repeat that one.
    firsts = np.minimum((grid <= _steps_to_next_plan(queues)).sum(axis=0), counts)
    rows = np.maximum(np.arange(firsts.min(), len(grid) + 1)[:, None], firsts)
    times = np.take_along_axis(grid, np.maximum(rows - 1, 0), axis=0)
    at = queues.in_reach.nonzero()[0]
    moments = _moments(queues, after, at, held, np.minimum(times[:, which[at]], ahead[at]), z > 0)
    now = (firsts == 0)[which[at]].nonzero()[0]
    moments[0, 0, now], moments[1:, 0, now] = held[at[now]], 0.0
    return CurveDemand(held, limits, moments, z, queues.in_reach.cumsum() - 1, slots=slots)


def _moments(
    queues: WorkerQueues, after: After, at: Ints, held: Floats, times: Ints, with_variance: bool
) -> Floats:
    """The moments of the jobs `at` at these times, (2 or 1, times, at)."""
    block_tokens = queues.block_tokens
    if not isinstance(block_tokens, int):
        block_tokens = block_tokens[at]
    holds = np.maximum(whole_blocks(queues.jobs.context[at] + times, block_tokens), held[at])
    mean = holds * after.select(at).survival(times - 1)
    return np.stack([mean, (holds - mean) * mean] if with_variance else [mean])  # m² p (1 − p)


def _steps_to_next_plan(queues: WorkerQueues) -> Floats:
    """For each queue."""
    runs = queues.is_running.nonzero()[0]
    which, count = queues.lines.which[runs], len(queues.workers)
    seqs = np.bincount(which, minlength=count).tolist()
    contexts = np.bincount(which, queues.jobs.context[runs], count).tolist()
    batches = zip(queues.workers, seqs, contexts, strict=True)
    return np.array([steps_to_next_plan(queues.numbers, *batch) for batch in batches])


def _times(queues: WorkerQueues, after: After, most: Ints) -> tuple[Ints, Ints]:
    """Evaluation times in tokens from now, (times, queues), ascending from 1 to at most `most`, and
    how many each queue has: the last one is repeated where others have more.

    The curve only falls where answers may end, so the times are spread evenly over possible ends,
    and include the last one. Each job contributes its own quantiles, so that many jobs together
    cover more ends."""
    starts, which, output = queues.lines.starts, queues.lines.which, queues.jobs.output
    count, span = len(starts), float(most.max()) + 1.0  # a queue's times are below the next one's
    begins, highest = span * which, most[which].astype(float)
    offset = (GOLDEN * queues.lines.nth) % 1
    each = np.minimum(np.maximum(POOLED // queues.lines.sizes, 1), FINEST)
    found = [_clipped(np.maximum.reduceat(after.longest() - output, starts), most)]
    found[0] += span * np.arange(count)
    above = each[which]  # how many of its quantiles lie above the last time
    for quantiles in distinct(each):
        at = (each == quantiles)[which].nonzero()[0]
        shares = (np.arange(1, quantiles + 1)[:, None] - offset[at]) / quantiles
        ends, row = after.select(at).quantiles_upto(output[at] + most[which[at]], shares)
        at = at[row]
        found.append(_clipped(ends - output[at], highest[at]) + begins[at])
        above -= np.bincount(at, minlength=len(which))
    at = (above > 0).nonzero()[0]  # their ends are at the last time, or earlier at the cap
    found.append(_clipped(queues.jobs.cap[at] - output[at], highest[at]) + begins[at])
    times = _ascending(np.concatenate(found), span * count)
    bounds = times.searchsorted(span * np.arange(count + 1))
    many = bounds[1:] - bounds[:-1]
    counts = np.minimum(many, TIMES)
    nth = np.minimum(np.arange(int(counts.max()))[:, None], counts - 1)
    nth = np.where(many > TIMES, nth * (many - 1) // (TIMES - 1), nth)
    return (times[bounds[:-1] + nth] - span * np.arange(count)).astype(np.int64), counts


def _ascending(times: Floats, end: float) -> Floats:
    """The different ones of these whole numbers below `end`, ascending. Where they are dense they
    are marked, in a fraction of the time of a sort."""
    if end <= DENSE * len(times):
        marked = np.zeros(int(end), bool)
        marked[times.astype(np.int64)] = True
        return marked.nonzero()[0].astype(float)
    times = np.sort(times)
    distinct_times: Floats = times[np.concatenate([[True], times[1:] != times[:-1]])]
    return distinct_times


def _clipped(ends: Ints | Floats, most: Ints | Floats) -> Floats:
    """Whole times from 1 to `most`."""
    return np.minimum(np.maximum(np.ceil(ends), 1.0), most)


def feedback(snapshot: Snapshot, params: Params, memory: PolicyMemory) -> PolicyMemory:
    """z adjusted by outcomes: up by STEP per eviction, down by STEP · `eviction_share` per
    completed request.

    It settles where evictions are that share of completions (Robbins–Monro with a constant step,
    which follows a drifting load). Completions while no request waits leave z unchanged: an idle
    hour must not end in a burst of evictions. z stays between 0, where the demand still rises
    with each job, and LARGEST_Z.
    """
    target = params["eviction_share"]
    evictions = snapshot.evictions - memory.number(SEEN_EVICTIONS)
    endings = snapshot.endings - memory.number(SEEN_ENDINGS)
    if not target or not (evictions or endings):
        return memory
    down = target * endings if len(snapshot.queued) else 0.0
    z = memory.number(Z, params["z"]) + STEP * (evictions - down)
    seen = {SEEN_EVICTIONS: float(snapshot.evictions), SEEN_ENDINGS: float(snapshot.endings)}
    return memory.with_numbers(**{Z: min(max(z, 0.0), LARGEST_Z)}, **seen)


PARAMS = {
    "z": Param(1.5, 0.0, LARGEST_Z),
    "reserved": Param(0.0, 0.0, 1.0),
    "eviction_share": Param(0.02, 0.0, 1.0),
    "tpot_share": Param(0.0, 0.0, 1.0),
}
