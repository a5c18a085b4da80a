"""The scheduler's core for one engine of vLLM: requests and progress in, plans out.

Time is an argument, and nothing here knows vLLM: this is `SchedulerState` with one worker.
"""

from collections.abc import Callable, Iterable, Sequence
from math import inf

import numpy as np

from services.core import (
    Completion,
    LiveAnswers,
    Outcome,
    Plan,
    Report,
    Request,
    RequestProgress,
    WorkerView,
)
from services.costs import CostModel
from services.policies.preset import Preset
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.phases import RequestPhase
from services.scheduler.core.populations import live_answers
from services.scheduler.core.state import SchedulerState

LINK = "vllm"
ROOM_SHARE = 0.8  # of the memory: below it no policy holds a request back
UNBOUNDED = 2**31  # vLLM's own queue is not bounded, and a request in it cannot be refused

Observe = Callable[[ev.Step, SchedulerState], None]


class Planner:
    """One thread at a time. `observe` receives each step of the state once it is done."""

    def __init__(
        self,
        preset: Preset,
        view: WorkerView,
        tenant_weights: dict[str, float],
        now: float,
        observe: Observe = lambda *_: None,
    ):
        limits = SchedulerLimits(UNBOUNDED, patience_s=0.0, tenant_weights=tenant_weights)
        self.state = SchedulerState(preset, limits)
        self._view = view
        self._observe = observe
        self._outcomes: list[Outcome] = []
        self._plan = Plan(0)
        self._reports = 0
        self._step(ev.WorkerAttached(LINK, view), now)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.state.jobs

    @property
    def waiting(self) -> int:
        return self.state.ledger.waiting

    def submit(self, request: Request, now: float) -> bool:
        """Returns whether plans decide about this request: not if it cannot run to its end in this
        engine's memory."""
        self._step(ev.Submitted(LINK, request), now)
        return request.request_id in self

    def learned(self, news: Iterable[ev.Forecasted | ev.Refreshed], now: float) -> None:
        """Forecasts of ended requests are ignored."""
        for event in news:
            self._step(event, now)

    def live_answers(self) -> list[LiveAnswers]:
        """Lengths so far of the answers that have not ended."""
        return live_answers(self.state.ledger)

    def cost_measured(self, cost: CostModel, now: float) -> None:
        self._step(ev.Costed(self._view.worker_id, cost), now)

    def is_due(self, now: float, news: bool) -> bool:
        """Whether a round may change something. `news`: requests have ended, or vLLM has
        preempted some."""
        return bool(news or self.waiting or self.state.round_due_s <= now)

    def admit_at_once(self, request_ids: Sequence[str], now: float) -> list[str]:
        """Admits new requests without a round, if no others wait and memory has room for all that
        run to their expected ends: returns them, or none. A new request is expected to have the
        mean length of the running ones, or max_tokens if none runs. The next round may still pause
        them. O(running)."""
        ledger, board = self.state.ledger, self.state.ledger.board
        jobs = [ledger.jobs[name] for name in request_ids if name in ledger.jobs]
        if not jobs or ledger.waiting > len(jobs):
            return []
        (worker,) = ledger.workers.values()
        if len(worker.running) + len(jobs) > self._view.max_running:
            return []
        columns = board.jobs
        runs = (board.phase == RequestPhase.RUNNING).nonzero()[0]
        rows = np.array([job.row for job in jobs])
        expected = columns.total[runs]
        usual = float(expected.mean()) if len(runs) else inf
        ends = float((columns.prompt[runs] + expected).sum())
        ends += float((columns.prompt[rows] + np.minimum(columns.cap[rows], usual)).sum())
        if ends > ROOM_SHARE * self._view.kv_tokens:
            return []
        ledger.begin_step(now)
        ledger.admit(jobs, [worker] * len(jobs), columns.cap[rows].tolist())
        (sent,) = self.state.rounds.pop_plans()
        self._plan = sent.plan
        self._observe(ev.Step(ev.Tick(), now, (), ledger.transitions), self.state)
        return [job.request_id for job in jobs]

    def plan(
        self,
        progress: Iterable[RequestProgress],
        finished: Iterable[Completion],
        cut_short: Iterable[Completion],
        preempted: Iterable[RequestProgress],
        free_blocks: int,
        shared_blocks: int,
        now: float,
    ) -> Plan:
        """Applies what has happened since the last plan, which has been carried out completely, and
        returns the next one. Requests that were `cut_short` ended without a complete answer."""
        self._reports += 1
        report = Report(
            self._reports,
            self._plan.seq,
            tuple(progress),
            tuple(finished),
            tuple(preempted),
            free_blocks=free_blocks,
            shared_blocks=shared_blocks,
        )
        last = self._plan
        for each in cut_short:
            self._step(ev.Cancelled(LINK, each.request_id, each.reason, each.output_tokens), now)
        self._step(ev.Reported(LINK, self._view.worker_id, report), now)
        self._step(ev.Round(), now)
        return self._plan if self._plan is not last else Plan(last.seq)

    def pop_outcomes(self) -> list[Outcome]:
        """Ended requests to learn from since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def _step(self, event: ev.Event, now: float) -> None:
        actions = self.state.step(event, now)
        self._observe(self.state.last_step, self.state)
        for action in actions:
            match action:
                case ev.Learn():
                    self._outcomes.append(action.outcome)
                case ev.SendPlan():
                    self._plan = action.plan
                case _:
                    pass  # messages to gateways and predictors, of which there are none
