"""What askers, requests whose clients want to know, are told is foreseen of them.

A forecast is told once it is known and a round has looked at its request, which has found when its
first token comes: that is its promise, told once. From then on whatever replaces the forecast is
told too. Times are what is expected by the last forecasts and cost models:

  a token   a step of all that run at its worker now; who waits may come to any that has its model
  a promise, of one that runs: the prompts its worker was given up to its own, in a step with those
            that run there
            of one that waits: until the first that runs has ended, then the work of those that
            wait ahead of it, at the rate of its model's workers now, but no longer than until
            ageing brings it to the front; then its prompt, in a step with as many as run now

No bounds: that memory is short for it, that its prefix is cached and who comes later and goes ahead
are not foreseen. What is told is expected; the gateway, where it shows what came, makes of it what
a client is promised. Nothing is done where nobody asks.
"""

from collections.abc import Iterable, Sequence
from math import inf

import numpy as np

from services.forecast import Floats, Forecast
from services.policies.order.ranking import Ranking
from services.scheduler.core.board import RequestPhase
from services.scheduler.core.events import SendForecast
from services.scheduler.core.jobs import Job, WorkerJobs
from services.scheduler.core.ledger import Ledger

LEAST_S = 1e-6  # a token takes no less, whatever a cost model says
RETELL_S = 2.0  # a population's forecast changes with every outcome: it is told anew so often


class ForecastUpdates:
    """Owned by the state. What is returned is to be told, in order."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._retold_s = -inf

    def replaced(self, jobs: Iterable[Job]) -> list[SendForecast]:
        """Of these askers a forecast has come; those that no round knows yet are told after it."""
        untold = self._ledger.untold
        known = [job for job in jobs if job.request_id not in untold]
        return self._tell(known, self._steps_s()) if known else []

    def refreshed(self, forecasts: Sequence[Forecast], now: float) -> list[SendForecast]:
        """Of whole populations newer ones have come. O(askers)."""
        newer = {forecast.shared_key: forecast for forecast in forecasts}
        found = [job for job in self._ledger.askers.values() if job.shared_key in newer]
        for job in found:
            job.forecast = newer[job.shared_key]
        if not found or now < self._retold_s + RETELL_S:
            return []
        self._retold_s = now
        return self.replaced(found)

    def looked_at(self, ranking: Ranking, next_s: float, now: float) -> list[SendForecast]:
        """A round is over, and the next comes at `next_s` if nothing happens: who it has looked at
        first has its promise, unless it has tokens. O(jobs), and O(untold)."""
        ledger, untold = self._ledger, self._ledger.untold
        steps_s = self._steps_s()
        firsts_s = {
            **_of_running(ledger, untold.values()),
            **_of_waiting(ledger, untold.values(), ranking, next_s, now, steps_s),
        }
        found = [untold.pop(name) for name in firsts_s]
        for job in found:
            if not (job.promised or job.request.worker_id or ledger.output(job)):
                job.promised = True
                job.ttft_s = max(0.0, now - job.request.arrival_s) + firsts_s[job.request_id]
        return self._tell(found, steps_s)

    def _tell(self, jobs: Sequence[Job], steps_s: dict[str, float]) -> list[SendForecast]:
        """Of those of whom a forecast is known; while no worker has its model, it waits for one."""
        told = []
        for job in jobs:
            token_s = self._token_s(job, steps_s)
            if not token_s:
                self._ledger.untold[job.request_id] = job
            elif job.forecast:
                told.append(
                    SendForecast(job.link, job.request_id, job.forecast, token_s, job.ttft_s)
                )
                job.ttft_s = None
        return told

    def _steps_s(self) -> dict[str, float]:
        """The time of a step at each worker. O(rows) a worker."""
        return {name: _step_s(self._ledger, w) for name, w in self._ledger.workers.items()}

    def _token_s(self, job: Job, steps_s: dict[str, float]) -> float:
        """0 while no worker has its model."""
        home = self._ledger.home(job)
        if self._ledger.phase(job) is RequestPhase.RUNNING and home in steps_s:
            return steps_s[home]
        return _mean([steps_s[worker.view.worker_id] for worker in _serving(self._ledger, job)])


def _serving(ledger: Ledger, job: Job) -> list[WorkerJobs]:
    model = job.request.model
    return [worker for worker in ledger.workers.values() if worker.view.model == model]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _step_s(ledger: Ledger, worker: WorkerJobs) -> float:
    """Of all that run there, a token each; of one alone where nobody does."""
    board = ledger.board
    rows = np.flatnonzero(
        (board.phase == RequestPhase.RUNNING) & (board.jobs.home == worker.number)
    )
    context = board.jobs.prompt[rows] + board.jobs.output[rows]
    return max(LEAST_S, worker.cost.step_s(0, max(1, len(rows)), float(context.sum())))


def _of_running(ledger: Ledger, askers: Iterable[Job]) -> dict[str, float]:
    """Seconds until the first token of those that run by now, by request."""
    by_home: dict[str, list[Job]] = {}
    for job in askers:
        if ledger.phase(job) is RequestPhase.RUNNING:
            by_home.setdefault(ledger.home(job), []).append(job)
    firsts_s: dict[str, float] = {}
    for home, jobs in by_home.items():
        firsts_s |= _of_begun(ledger, ledger.workers[home], jobs)
    return firsts_s


def _of_begun(ledger: Ledger, worker: WorkerJobs, jobs: Sequence[Job]) -> dict[str, float]:
    """Of those at one worker. O(n log n) of all that run there."""
    board, columns = ledger.board, ledger.board.jobs
    rows = np.flatnonzero((board.phase == RequestPhase.RUNNING) & (columns.home == worker.number))
    rows = rows[np.argsort(columns.admitted[rows])]
    context, held = columns.prompt[rows] + columns.output[rows], columns.held[rows]
    begins = held < columns.prompt[rows]
    missing = np.cumsum(np.where(begins, context - held, 0))
    read = np.cumsum(np.where(begins, context, 0)) + context[~begins].sum()
    decoding = len(rows) - int(np.count_nonzero(begins))
    at = {row: place for place, row in enumerate(rows.tolist())}
    firsts_s = {}
    for job in jobs:
        place = at[job.row]
        step_s = worker.cost.step_s(float(missing[place]), decoding, float(read[place]))
        firsts_s[job.request_id] = max(LEAST_S, step_s)
    return firsts_s


def _of_waiting(
    ledger: Ledger,
    askers: Iterable[Job],
    ranking: Ranking,
    next_s: float,
    now: float,
    steps_s: dict[str, float],
) -> dict[str, float]:
    """Of those that a round has found in the queue and left there, and that some worker serves:
    once their forecasts are known, for without one they are taken to be the longest."""
    waiting = [job for job in askers if job.forecast and ledger.phase(job) is RequestPhase.QUEUED]
    places = _places(ranking, [job.row for job in waiting])
    by_model: dict[str, list[Job]] = {}
    for job in waiting:
        if job.row in places and _serving(ledger, job):
            by_model.setdefault(job.request.model, []).append(job)
    firsts_s: dict[str, float] = {}
    for jobs in by_model.values():
        workers = _serving(ledger, jobs[0])
        steps = [steps_s[worker.view.worker_id] for worker in workers]
        rate = sum(
            max(1, len(w.running)) / step_s for w, step_s in zip(workers, steps, strict=True)
        )
        prompt_s = _mean([w.cost.prefill_token_s + w.cost.context_token_s for w in workers])
        leaves_s = _leaves_s(ledger, workers, steps_s)
        if leaves_s == inf:  # nobody runs: the next round may begin them
            leaves_s = next_s - now if now < next_s < inf else 0.0
        ahead_s = _ahead_s(ledger, ranking, jobs[0], rate, prompt_s / len(workers))
        for job in jobs:
            at = places[job.row]
            wait_s = min(leaves_s + float(ahead_s[at]), max(0.0, float(ranking.lift_s[at])))
            begin_s = job.request.prompt_tokens * prompt_s + _mean(steps)
            firsts_s[job.request_id] = max(LEAST_S, wait_s + begin_s)
    return firsts_s


def _places(ranking: Ranking, rows: Sequence[int]) -> dict[int, int]:
    """Where those of these rows stand that the ranking found in the queue."""
    at = np.flatnonzero(np.isin(ranking.queued, np.array(rows, np.int64)))
    return dict(zip(ranking.queued[at].tolist(), at.tolist(), strict=True))


def _leaves_s(ledger: Ledger, workers: Sequence[WorkerJobs], steps_s: dict[str, float]) -> float:
    """Until the first that runs at one of these is expected to end; infinite where nobody does."""
    board = ledger.board
    first_s = inf
    for worker in workers:
        runs = (board.phase == RequestPhase.RUNNING) & (board.jobs.home == worker.number)
        left = board.jobs.expected_remaining[runs]
        if len(left):
            first_s = min(first_s, max(1.0, float(left.min())) * steps_s[worker.view.worker_id])
    return first_s


def _ahead_s(ledger: Ledger, ranking: Ranking, job: Job, rate: float, prompt_s: float) -> Floats:
    """Of each that the ranking found in the queue, the time that all of this one's model take that
    still wait and are more urgent: tokens expected of them at `rate` a second, prompts at
    `prompt_s` a token. O(queued log queued)."""
    board, rows, columns = ledger.board, ranking.queued, ledger.board.jobs
    counts = (board.phase[rows] == RequestPhase.QUEUED) & (
        columns.model[rows] == columns.model[job.row]
    )
    left = np.maximum(columns.total[rows] - columns.output[rows], 1.0)
    missing = np.maximum(columns.prompt[rows] + columns.output[rows] - columns.held[rows], 0)
    takes_s = np.where(counts, left / rate + missing * prompt_s, 0.0)
    key = ranking.key[: ranking.split]
    order = np.argsort(key, kind="stable")
    before_s = np.concatenate([np.zeros(1), np.cumsum(takes_s[order])])
    ahead_s: Floats = before_s[np.searchsorted(key[order], key, side="left")]
    return ahead_s
