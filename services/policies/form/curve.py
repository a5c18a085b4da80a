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

from dataclasses import dataclass

import numpy as np

from services.forecast import Floats, Ints
from services.forecasttable import After
from services.policies.cadence import steps_to_next_plan
from services.policies.form.demand import Demand, Need, WorkerQueues, needed_tokens
from services.policies.memory import PolicyMemory
from services.policies.parameters import Param, Params
from services.policies.snapshot import Bools, Snapshot, distinct, whole_blocks

TIMES = 16  # evaluation times of the curve, in addition to now
POOLED = 512  # candidate end times from which these are chosen
FINEST = 64  # quantiles per job
GOLDEN = 0.6180339887  # its multiples modulo 1 are evenly spread, for any number
LARGEST_Z = 8.0
Z, SEEN_EVICTIONS, SEEN_ENDINGS = "curve_z", "curve_evictions", "curve_endings"
STEP = 0.1  # change of z per eviction, in standard deviations


@dataclass(frozen=True, slots=True)
class CurveDemand(Demand):
    """`moments`, (2, times, columns), are the mean and the variance of the jobs' memory at each
    time; with a `z` of 0 without the variance. `columns` are those of the jobs; jobs that cannot
    run next have none. max over times of Σ mean + z · √(Σ variance) must fit. O(times · jobs)."""

    moments: Floats
    z: float
    columns: Ints

    def count_fitting(self, order: Ints, base: int, most: int) -> tuple[int, Need]:
        columns = self.columns[order[: base + most + 1]]
        stay, next_ones = columns[:base], columns[base:]
        needs = self._highest(_running_sums(self.moments, stay, next_ones))
        fit = int(np.searchsorted(needs, self.limit, side="right")) - 1
        return min(most, max(0, fit)), lambda count: float(needs[count])

    def able(self, kept: Ints, later: Ints) -> Bools:
        """Exact for this demand."""
        stay, next_ones = self.columns[kept], self.columns[later]
        moments = _sum(self.moments, stay) + self.moments.take(next_ones, axis=2)
        fits: Bools = self._highest(moments) <= self.limit
        return fits

    def _highest(self, moments: Floats) -> Floats:
        total = moments[0]
        if self.z:
            total = total + self.z * np.sqrt(moments[1])
        highest: Floats = total.max(axis=0)
        return highest


def _sum(moments: Floats, rows: Ints) -> Floats:
    total: Floats = moments.take(rows, axis=2).sum(axis=2, keepdims=True)
    return total


def _running_sums(moments: Floats, stay: Ints, next_ones: Ints) -> Floats:
    """Sums of the kept jobs alone, with the first later one, the first two, and so on."""
    sums = np.empty((*moments.shape[:2], 1 + len(next_ones)))
    sums[:, :, :1] = _sum(moments, stay)
    sums[:, :, 1:] = moments.take(next_ones, axis=2)
    return np.cumsum(sums, axis=2, out=sums)


def curves(queues: WorkerQueues, params: Params, rng: np.random.Generator) -> list[Demand]:
    """max_t E(t) + z · sd(t) fits in (1 − `reserved`) · capacity from the next plan on, with E = Σ
    m_i p_i and sd² = Σ m_i² p_i (1 − p_i).

    m_i(t) is a job's memory while it makes its t-th token from now, in whole blocks, and p_i(t)
    the probability that it makes that token. From the end of its slice on, both stay as they
    are there, unless it ends there at its cap. With known lengths and whole answers the maximum is
    Past-Future's M*. Every job is assumed to make one token per step. z is `z`, as adjusted by
    feedback. O(times · jobs), in one pass over all queues.
    """
    z = queues.numbers.get(Z, params["z"]) if params["eviction_share"] else params["z"]
    limits = [(1 - params["reserved"]) * worker.room_tokens for worker in queues.workers]
    jobs, which, held = queues.jobs, queues.which, needed_tokens(queues)
    if not len(jobs):
        nothing = np.zeros((1 + (z > 0), 1, 0))
        return [CurveDemand(held, limit, nothing, z, jobs.rows) for limit in limits]
    after = queues.forecasts.after(jobs.forecast, jobs.output, jobs.cap)
    ahead = np.maximum(queues.limits - jobs.output, 1)
    most = np.maximum.reduceat(ahead, queues.starts)
    ends = queues.limits >= jobs.cap
    ahead[ends] = most[which[ends]]  # it ends there, and keeps nothing
    grid, counts = _times(queues, after, most)
    # Row 0 is now. The curve counts from the last time that is not after the next plan.
    firsts = np.minimum((grid <= _steps_to_next_plan(queues)).sum(axis=0), counts)
    lead = int(firsts.min())
    at = queues.in_reach.nonzero()[0]
    times = grid[max(0, lead - 1) :].take(which[at], axis=1)
    np.minimum(times, ahead[at], out=times)
    moments = _moments(queues, after, at, held[at], times, z > 0, lead == 0)
    columns = queues.in_reach.cumsum() - 1
    bounds = np.concatenate([[0], columns[queues.sizes.cumsum() - 1] + 1]).tolist()
    demands: list[Demand] = []
    begin = 0
    for nth, (limit, size, first, count) in enumerate(
        zip(limits, queues.sizes.tolist(), firsts.tolist(), counts.tolist(), strict=True)
    ):
        part = slice(begin, begin + size)
        own = moments[:, first - lead : 1 + count - lead, bounds[nth] : bounds[nth + 1]]
        at_own = columns[part] - bounds[nth]
        demands.append(CurveDemand(held[part], limit, np.ascontiguousarray(own), z, at_own))
        begin += size
    return demands


def _moments(
    queues: WorkerQueues,
    after: After,
    at: Ints,
    held: Floats,
    times: Ints,
    with_variance: bool,
    from_now: bool,
) -> Floats:
    """The moments of these jobs at these times, (2 or 1, times, at); with `from_now` first those of
    now."""
    block_tokens = queues.block_tokens
    if not isinstance(block_tokens, int):
        block_tokens = block_tokens[at]
    holds = np.maximum(whole_blocks(queues.jobs.context[at] + times, block_tokens), held)
    mean = holds * after.select(at).survival(times - 1)
    if from_now:
        holds, mean = np.concatenate([[held], holds]), np.concatenate([[held], mean])
    return np.stack([mean, (holds - mean) * mean] if with_variance else [mean])  # m² p (1 − p)


def _steps_to_next_plan(queues: WorkerQueues) -> Floats:
    """For each queue."""
    runs = queues.is_running.nonzero()[0]
    which, count = queues.which[runs], len(queues.workers)
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
    starts, which, output = queues.starts, queues.which, queues.jobs.output
    count, span = len(starts), float(most.max()) + 1.0  # a queue's times are below the next one's
    begins, highest = span * which, most[which].astype(float)
    offset = (GOLDEN * (np.arange(len(which)) - starts[which])) % 1
    each = np.minimum(np.maximum(POOLED // queues.sizes, 1), FINEST)
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
    times = np.concatenate(found)
    times.sort()
    times = times[np.concatenate([[True], times[1:] != times[:-1]])]
    bounds = times.searchsorted(span * np.arange(count + 1))
    many = bounds[1:] - bounds[:-1]
    counts = np.minimum(many, TIMES)
    nth = np.minimum(np.arange(int(counts.max()))[:, None], counts - 1)
    nth = np.where(many > TIMES, nth * (many - 1) // (TIMES - 1), nth)
    return (times[bounds[:-1] + nth] - span * np.arange(count)).astype(np.int64), counts


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
}
