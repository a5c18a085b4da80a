"""Observations of a run, for its plots: memory over time, timelines of requests, and forecasts.

They read the scheduler's state and the workers' memory, and change neither.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from services.forecast import Floats, Forecast, Ints
from services.policies.form.demand import WorkerQueues
from services.policies.form.past_future import PARAMS, PrefixPeaks, past_future
from services.policies.snapshot import Snapshot, WorkerSnapshot
from services.scheduler.core.phases import RequestPhase, Transition, TransitionCause
from services.scheduler.core.state import SchedulerState
from simulator.engine.settings import ObservationLimits

RUNNING = RequestPhase.RUNNING
DEFAULTS = {name: param.default for name, param in PARAMS.items()}
LOW, HIGH = 0.05, 0.95  # ends of the central 90 % interval


class WorkerMemory(NamedTuple):
    """KV tokens of a worker at one time, in whole blocks; shared blocks count once.

    `used` are all device blocks in use, `running` those of running requests. The peaks are
    Past-Future's M* (Eq. 2–4) of the requests that the scheduler runs there, less what is shared
    now: with lengths drawn from their forecasts, as its rule draws them, and with their true
    lengths.
    """

    used: float
    running: float
    predicted_peak: float
    true_peak: float


class MemorySamples:
    """The memory of all workers after rounds, at most `limit` samples.

    Every n-th round is sampled. n is 1 until the samples are full; then every other sample is
    dropped and n doubles.
    """

    def __init__(self, limit: int):
        self.at_s: list[float] = []
        self.workers: list[tuple[WorkerMemory, ...]] = []  # parallel to at_s
        self._limit = limit
        self._every = 1
        self._rounds = 0

    def of_worker(self, number: int) -> Floats:
        """The samples of one worker, (4, samples); the rows are the fields of WorkerMemory."""
        return np.array([workers[number] for workers in self.workers], float).reshape(-1, 4).T

    def count_round(self) -> bool:
        """Counts a round; returns whether it is to be sampled."""
        self._rounds += 1
        return (self._rounds - 1) % self._every == 0

    def add(self, at_s: float, workers: Iterable[WorkerMemory]) -> None:
        self.at_s.append(at_s)
        self.workers.append(tuple(workers))
        if len(self.at_s) >= self._limit:
            del self.at_s[1::2], self.workers[1::2]
            self._every *= 2


class RunningInterval(NamedTuple):
    """A request runs at a worker, as the scheduler knows it, and stops for a reason."""

    row: int
    worker: str
    start_s: float
    end_s: float
    ended: TransitionCause


class Timelines:
    """The running intervals of the requests of some rows, in order of their ends."""

    def __init__(self, rows: range):
        self.rows = rows
        self.intervals: list[RunningInterval] = []
        self._open: dict[int, tuple[str, float]] = {}  # worker and start

    def add(self, transitions: Iterable[Transition]) -> None:
        for change in transitions:
            row = int(change.request_id)
            if row not in self.rows or (change.before is RUNNING) == (change.after is RUNNING):
                continue
            if change.after is RUNNING:
                self._open[row] = change.worker_id, change.at_s
            else:
                self._close(row, change.at_s, change.cause)

    def finish(self, now: float) -> None:
        """Ends the intervals of requests with an end that the scheduler does not know yet."""
        for row in sorted(self._open):
            self._close(row, now, TransitionCause.FINISHED)

    def _close(self, row: int, now: float, cause: TransitionCause) -> None:
        self.intervals.append(RunningInterval(row, *self._open.pop(row), now, cause))


class ForecastRecords:
    """The forecast of each request at its arrival, beside its true length, in tokens; NaN where
    none was made. `low` and `high` are the 5 % and 95 % quantiles. `below` is the forecast
    probability of a shorter answer than the true one, `up_to` that of an answer up to it."""

    def __init__(self, lengths: Ints):
        self.lengths = lengths
        self.mean, self.low, self.high, self.below, self.up_to = np.full((5, len(lengths)), np.nan)

    def add(self, forecasts: Iterable[tuple[str, Forecast]]) -> None:
        for request_id, forecast in forecasts:
            row = int(request_id)
            length = int(self.lengths[row])
            self.mean[row] = forecast.mean()
            self.low[row], self.high[row] = forecast.quantile(LOW), forecast.quantile(HIGH)
            self.below[row] = 1 - forecast.survival(length - 1)
            self.up_to[row] = 1 - forecast.survival(length)


class Observations:
    """All observations of a run. `lengths` are the true lengths of its requests."""

    def __init__(self, limits: ObservationLimits, lengths: Ints):
        first = max(0, (len(lengths) - limits.requests) // 2)
        self.memory = MemorySamples(limits.samples)
        self.timelines = Timelines(range(first, min(len(lengths), first + limits.requests)))
        self.forecasts = ForecastRecords(lengths)

    def sample_memory(
        self, state: SchedulerState, now: float, held: Sequence[tuple[int, int]]
    ) -> None:
        """Samples all workers after a round; `held` are the KV tokens of each in use, and those of
        its running requests. O(running requests · log)."""
        snapshot = state.ledger.board.snapshot(now, state.ledger.worker_snapshots())
        lengths = self.forecasts.lengths
        samples = []
        for worker, (used, running) in zip(snapshot.workers, held, strict=True):
            rows = snapshot.running[snapshot.jobs.home[snapshot.running] == worker.number]
            names = state.ledger.names(rows)
            ends = lengths[np.array([int(name) for name in names], np.int64)]
            peaks = _peaks(snapshot, worker, rows, ends, state.rounds.number)
            samples.append(WorkerMemory(used, running, *peaks))
        self.memory.add(now, samples)


def _peaks(
    snapshot: Snapshot, worker: WorkerSnapshot, rows: Ints, lengths: Ints, seed: int
) -> tuple[float, float]:
    """The peaks of these rows by their forecasts and by their true lengths. The draws use a
    generator of their own."""
    jobs = snapshot.jobs.select(rows)
    is_running = np.ones(len(rows), bool)
    queue = WorkerQueues.single(jobs, is_running, jobs.limit, worker, snapshot.forecasts, {})
    demand, none = past_future(queue, DEFAULTS, np.random.default_rng(seed)), np.zeros(1, np.int64)
    _, needed = demand.count_fitting(queue.lines, queue.lines.sizes, none)
    remaining = np.maximum(lengths - jobs.output, 0).astype(float)
    true_peak = PrefixPeaks(len(rows), demand.held, remaining[None])(0)
    shared = worker.shared_blocks * worker.block_tokens
    return max(0.0, float(needed(none)[0]) - shared), max(0.0, true_peak - shared)
