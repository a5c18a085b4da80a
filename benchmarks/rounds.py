"""Pure policy time of one planning round: deal the queue, foresee, admit. No encoding, no RPC."""

import time

import numpy as np
from services.batcher.group import Columns, GroupView
from services.batcher.policies import POLICIES, resolve
from services.scheduler.presets import choose

from services.core import Progress, Report, Request, WorkerView
from services.forecast import ForecastTable, from_lengths
from services.scheduler import events as ev
from services.scheduler.state import SchedulerState

LINK = "bench#1"
KV_TOKENS = 64_000  # the 64 running fill about half of it, so some of the queue gets in


class Busy:
    """A scheduler with so many requests running and queued, lengths drawn from one history.

    Every round is decided by the real policy, but nobody enters once it is set up, so that every
    repeat sees the same.
    """

    def __init__(self, policy: str, running: int, queued: int):
        rng = np.random.default_rng(0)
        lengths = rng.integers(16, 1_000, 1_000).tolist()
        self._history = from_lengths(lengths, 1_000, "history", 1, "history")
        self._state = SchedulerState(choose(policy))
        self._reports = 0
        view = WorkerView("w", "w", "demo", KV_TOKENS, 16, 256, 4_096)
        self._state.step(ev.WorkerAttached(LINK, view), 0.0)
        prompts = rng.integers(16, 512, running + queued).tolist()
        for i in range(running):
            self._submit(i, prompts[i], admit=1)
        outputs = rng.integers(1, 400, running).tolist()
        self._progress = tuple(
            Progress(f"r{i}", output, prompts[i] + output) for i, output in enumerate(outputs)
        )
        self.report()
        for i in range(running, running + queued):
            self._submit(i, prompts[i], admit=0)

    def _submit(self, i: int, prompt_tokens: int, admit: int) -> None:
        request = Request(f"r{i}", "demo", prompt_tokens, 1_024, float(i))
        self._state.step(ev.Submitted(LINK, request), 0.0)
        forecasts = ((request.request_id, self._history),)
        self._answer(self._state.step(ev.Forecasted(forecasts), 0.0), admit)

    def report(self) -> None:
        """A worker's report of all that run, and the round that it makes due, to its end."""
        self._reports += 1
        event = ev.Reported(LINK, "w", Report(self._reports, 0, self._progress))
        self._answer(self._state.step(event, 0.0), admit=0)

    def _answer(self, actions: list[ev.Action], admit: int) -> None:
        for problem in (a for a in actions if isinstance(a, ev.AskBatch)):
            decide(problem)
            self._state.step(ev.Formed(problem.round, (ev.Batch("w", admit),)), 0.0)


def round_ms(
    policy: str, running: int = 64, queued: int = 1_000, repeats: int = 200
) -> list[float]:
    """Milliseconds of whole rounds: the report is noted, the queue dealt, who runs ranked against
    it, the policy decides, the answer is taken."""
    busy = Busy(policy, running, queued)
    took = []
    for _ in range(repeats):
        began = time.perf_counter()
        busy.report()
        took.append((time.perf_counter() - began) * 1e3)
    return took


def decide(problem: ev.AskBatch) -> tuple[ev.Batch, ...]:
    """What the batcher computes of it, by the real policy."""
    table = ForecastTable(problem.forecasts)
    params = resolve(problem.policy, problem.params)
    rng = np.random.default_rng(problem.round)
    batches = []
    for group in problem.groups:
        running, queued = _columns(group.running), _columns(group.queued)
        view = GroupView(group.kv_tokens, group.max_running, running, queued, table)
        decision = POLICIES[problem.policy](view, params, rng)
        batches.append(ev.Batch(group.worker_id, decision.admit, decision.peak_tokens))
    return tuple(batches)


def _columns(columns: ev.Columns) -> Columns:
    return Columns(
        *(
            np.array(column, np.int64)
            for column in (
                columns.prompt_tokens,
                columns.output_tokens,
                columns.max_tokens,
                columns.forecast,
            )
        )
    )
