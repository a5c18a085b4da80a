"""Forecast updates for requests that ask for them (`include_forecast`).

The first update is sent once the forecast is known and a round has ranked the request; it carries
the expected time to the first token (the promise), which is sent once. Every later forecast is sent
as it arrives. Times follow from the current forecasts and cost models:

  token_s   a decode step of all requests that run at its worker, by the tokens that a request gets
            in it; while it waits, the mean over the workers of its model
  ttft_s    of a running request: the prefill of all prompts that its worker was given up to its
            own, in one step with the requests that decode there
            of a waiting request: the time until the first running request ends, plus the work of
            the waiting requests ahead of it at its model's present rate (at most the time until
            ageing brings it to the front), plus its own prefill

These are expectations, not bounds: memory pressure, cached prefixes and later arrivals are not
considered. The gateway calibrates them against what it observes. Without such requests this costs
nothing.

A request with a `length_quantile` gets that quantile of each forecast of its own at once: its
gateway reserves so many tokens of an API key's limits.
"""

from collections.abc import Iterable, Sequence
from math import ceil, inf

import numpy as np

from services.forecast import Floats, Forecast, Ints
from services.policies.order.ranking import Ranking
from services.scheduler.core.events import AskForecast, SendForecast, SendLengthBound
from services.scheduler.core.jobs import Job, WorkerJobs
from services.scheduler.core.ledger import Ledger
from services.scheduler.core.phases import RequestPhase

MIN_S = 1e-6  # a token takes at least this, whatever a cost model says
RESEND_S = 2.0  # population forecasts change with every outcome; send them this often at most


class ForecastUpdates:
    """Owned by the state. Its methods return the updates to send, in order."""

    def __init__(self, ledger: Ledger):
        self._ledger = ledger
        self._resent_s = -inf

    def replaced(self, jobs: Iterable[Job]) -> list[SendForecast]:
        """These jobs have a new forecast. Those that no round has ranked yet are sent after it."""
        waiting = self._ledger.awaiting_promise
        known = [job for job in jobs if job.request_id not in waiting]
        return self._send(known, self._tokens_s()) if known else []

    def rejoined(self, job: Job) -> list[SendForecast | AskForecast]:
        """The earlier link of this job may have lost its forecast and its length bound."""
        request = job.request
        sent: list[SendForecast | AskForecast] = []
        if request.include_forecast:
            sent += self.replaced([job])
        if request.length_quantile:  # the bound follows the answer
            sent.append(AskForecast((request,)))
        return sent

    def bounded(self, job: Job, forecast: Forecast) -> list[SendLengthBound]:
        """The bound of a job's length by its new forecast; none if the job has no `length_quantile`
        or the forecast says no more than its `max_tokens`. O(64)."""
        request = job.request
        if not request.length_quantile:
            return []
        known = max(self._ledger.output(job), request.min_tokens - 1, 0)
        bound = ceil(forecast.quantile(request.length_quantile, known))
        if bound >= request.max_tokens:
            return []
        return [SendLengthBound(job.link, job.request_id, bound)]

    def refreshed(self, forecasts: Sequence[Forecast], now: float) -> list[SendForecast]:
        """Whole populations have newer forecasts. O(requests with include_forecast)."""
        newer = {forecast.shared_key: forecast for forecast in forecasts}
        found = [job for job in self._ledger.with_forecast.values() if job.shared_key in newer]
        for job in found:
            job.accept(newer[job.shared_key])
        if not found or now < self._resent_s + RESEND_S:
            return []
        self._resent_s = now
        return self.replaced(found)

    def ranked(self, ranking: Ranking, next_s: float, now: float) -> list[SendForecast]:
        """A round is over; without events the next one is at `next_s`. Requests that it ranked for
        the first time get their promise, unless they have tokens. O(jobs)."""
        ledger, waiting = self._ledger, self._ledger.awaiting_promise
        ledger.board.update_totals()
        tokens_s = self._tokens_s()
        firsts_s = {
            **_running_firsts_s(ledger, waiting.values()),
            **_waiting_firsts_s(ledger, waiting.values(), ranking, next_s, now, tokens_s),
        }
        found = [waiting.pop(name) for name in firsts_s]
        for job in found:
            if not (job.promised or job.request.worker_id or ledger.output(job)):
                job.promised = True
                job.ttft_s = max(0.0, now - job.request.arrival_s) + firsts_s[job.request_id]
        return self._send(found, tokens_s)

    def _send(self, jobs: Sequence[Job], tokens_s: dict[str, float]) -> list[SendForecast]:
        """Updates for the jobs with a forecast; a job of a model without a worker waits for one."""
        updates = []
        for job in jobs:
            token_s = self._token_s(job, tokens_s)
            if not token_s:
                self._ledger.awaiting_promise[job.request_id] = job
            elif job.forecast:
                updates.append(
                    SendForecast(job.link, job.request_id, job.forecast, token_s, job.ttft_s)
                )
                job.ttft_s = None
        return updates

    def _tokens_s(self) -> dict[str, float]:
        """The time of a token of each request at each worker. O(rows) a worker."""
        return {name: _batch_token_s(self._ledger, w) for name, w in self._ledger.workers.items()}

    def _token_s(self, job: Job, tokens_s: dict[str, float]) -> float:
        """0 while no worker serves its model."""
        home = self._ledger.home(job)
        if self._ledger.phase(job) is RequestPhase.RUNNING and home in tokens_s:
            return tokens_s[home]
        return _mean([tokens_s[worker.view.worker_id] for worker in _serving(self._ledger, job)])


def _serving(ledger: Ledger, job: Job) -> list[WorkerJobs]:
    return [worker for worker in ledger.workers.values() if worker.serves(job.request)]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))


def _running_rows(ledger: Ledger, worker: WorkerJobs) -> Ints:
    board = ledger.board
    runs = (board.phase == RequestPhase.RUNNING) & (board.jobs.home == worker.number)
    return np.flatnonzero(runs)


def _batch_token_s(ledger: Ledger, worker: WorkerJobs) -> float:
    """The time of a token of all requests that run there; of one if none runs."""
    rows = _running_rows(ledger, worker)
    context = float(ledger.board.jobs.context_at(rows).sum())
    step_s = worker.cost.step_s(0, max(1, len(rows)), context)
    return max(MIN_S, step_s / worker.cost.tokens_per_step)


def _running_firsts_s(ledger: Ledger, jobs: Iterable[Job]) -> dict[str, float]:
    """Seconds until the first token of the running jobs, by request."""
    by_home: dict[str, list[Job]] = {}
    for job in jobs:
        if ledger.phase(job) is RequestPhase.RUNNING:
            by_home.setdefault(ledger.home(job), []).append(job)
    firsts_s: dict[str, float] = {}
    for home, here in by_home.items():
        firsts_s |= _firsts_at_worker_s(ledger, ledger.workers[home], here)
    return firsts_s


def _firsts_at_worker_s(
    ledger: Ledger, worker: WorkerJobs, jobs: Sequence[Job]
) -> dict[str, float]:
    """O(n log n) of all requests that run at this worker."""
    columns, rows = ledger.board.jobs, _running_rows(ledger, worker)
    rows = rows[np.argsort(columns.admitted[rows])]
    context, held = columns.context_at(rows), columns.held[rows]
    prefills = held < columns.prompt[rows]
    missing = np.cumsum(np.where(prefills, context - held, 0))
    read = np.cumsum(np.where(prefills, context, 0)) + context[~prefills].sum()
    decoding = len(rows) - int(np.count_nonzero(prefills))
    positions = {row: at for at, row in enumerate(rows.tolist())}
    firsts_s = {}
    for job in jobs:
        at = positions[job.row]
        step_s = worker.cost.step_s(float(missing[at]), decoding, float(read[at]))
        firsts_s[job.request_id] = max(MIN_S, step_s)
    return firsts_s


def _waiting_firsts_s(
    ledger: Ledger,
    jobs: Iterable[Job],
    ranking: Ranking,
    next_s: float,
    now: float,
    tokens_s: dict[str, float],
) -> dict[str, float]:
    """Seconds until the first token of the jobs that the round left in the queue and that a worker
    serves. A job without a forecast is skipped: it would count as the longest."""
    waiting = [job for job in jobs if job.forecast and ledger.phase(job) is RequestPhase.QUEUED]
    positions = _positions(ranking, [job.row for job in waiting])
    by_model: dict[str, list[Job]] = {}
    for job in waiting:
        if job.row in positions and _serving(ledger, job):
            by_model.setdefault(job.request.model, []).append(job)
    firsts_s: dict[str, float] = {}
    for same_model in by_model.values():
        workers = _serving(ledger, same_model[0])
        times_s = [tokens_s[worker.view.worker_id] for worker in workers]
        rate = sum(
            max(1, len(w.running)) / token_s for w, token_s in zip(workers, times_s, strict=True)
        )
        step_s = _mean([t * w.cost.tokens_per_step for w, t in zip(workers, times_s, strict=True)])
        prompt_s = _mean([w.cost.prefill_token_s + w.cost.context_token_s for w in workers])
        first_end_s = _first_end_s(ledger, workers, tokens_s)
        if first_end_s == inf:  # nothing runs: the next round may admit it
            first_end_s = next_s - now if now < next_s < inf else 0.0
        ahead_s = _ahead_s(ledger, ranking, same_model[0], rate, prompt_s / len(workers))
        for job in same_model:
            at = positions[job.row]
            wait_s = min(first_end_s + float(ahead_s[at]), max(0.0, float(ranking.lift_s[at])))
            prefill_s = job.request.prompt_tokens * prompt_s + step_s
            firsts_s[job.request_id] = max(MIN_S, wait_s + prefill_s)
    return firsts_s


def _positions(ranking: Ranking, rows: Sequence[int]) -> dict[int, int]:
    """Positions in the ranked queue of those of these rows that are in it."""
    at = np.flatnonzero(np.isin(ranking.queued, np.array(rows, np.int64)))
    return dict(zip(ranking.queued[at].tolist(), at.tolist(), strict=True))


def _first_end_s(
    ledger: Ledger, workers: Sequence[WorkerJobs], tokens_s: dict[str, float]
) -> float:
    """Expected time until the first request that runs at these workers ends; infinite if none."""
    first_s = inf
    for worker in workers:
        left = ledger.board.jobs.expected_remaining[_running_rows(ledger, worker)]
        if len(left):
            first_s = min(first_s, max(1.0, float(left.min())) * tokens_s[worker.view.worker_id])
    return first_s


def _ahead_s(ledger: Ledger, ranking: Ranking, job: Job, rate: float, prompt_s: float) -> Floats:
    """For each position of the ranked queue, the work of the more urgent waiting requests of this
    job's model: expected output tokens at `rate` per second, prompts at `prompt_s` per token.
    O(queued log queued)."""
    board, rows, columns = ledger.board, ranking.queued, ledger.board.jobs
    counts = board.phase[rows] == RequestPhase.QUEUED
    counts &= columns.model[rows] == columns.model[job.row]
    left = np.maximum(columns.total[rows] - columns.output[rows], 1.0)
    takes_s = np.where(counts, left / rate + columns.missing_at(rows) * prompt_s, 0.0)
    key = ranking.key[: ranking.split]
    order = np.argsort(key, kind="stable")
    before_s = np.concatenate([np.zeros(1), np.cumsum(takes_s[order])])
    ahead_s: Floats = before_s[np.searchsorted(key[order], key, side="left")]
    return ahead_s
