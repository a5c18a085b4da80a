"""Drives a scheduler's state: sends events, keeps plans and actions."""

from typing import Any

import numpy as np
import pytest

from services.core import Plan, Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import Forecast
from services.policies.decide import rank_requests
from services.policies.order.alise import LEVEL
from services.policies.order.ranking import Ranking
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState

G = "gateway#1"
FRONT = -1  # the level of requests at the front
# A token takes 10 ms of a worker's time at any batch size; nothing else takes time. So with
# base_s 0.5 the levels end at 50, 100, 200, 400 … tokens.
COST = CostModel(0.0, 0.0, 0.01, 0.0, offload_token_s=0.001, upload_token_s=0.002)


def about(expected: Any) -> Any:
    """`pytest.approx`, untyped so that it can be part of a value."""
    return pytest.approx(expected)


class Driver:
    """A state with helpers that send events, each followed by a round if one is due. Keeps the
    plans."""

    def __init__(self, policy: str = "alise", memory: int = 300, places: int = 8, **choices: Any):
        self.watermark = memory / 10_000
        preset = choose(policy, {"base_s": 0.5, "watermark": self.watermark} | choices)
        self.state: Any = SchedulerState(preset)
        self.plans: list[Plan] = []
        self.sent: list[ev.Action] = []
        self.reports = 0
        self.now = 0.0
        self.attach("w0", memory, places)

    def attach(self, name: str, memory: int = 300, places: int = 8) -> None:
        """Attach a worker with this many plannable tokens, in blocks of one token. The watermark is
        low, so that the longest request fits the worker."""
        kv_tokens = round(memory / self.watermark)
        view = WorkerView(name, f"unix:/{name}", "demo", kv_tokens, 1, places, 5_000)
        self.step(ev.WorkerAttached(f"{name}#1", view), 0.0)
        self.step(ev.Costed(name, COST), 0.0)

    def step(self, event: ev.Event, now: float) -> None:
        self.now = now = max(now, self.now)  # tests may pass times out of order
        actions = self.state.step(event, now)
        if self.state.round_due_s <= now:
            actions += self.state.step(ev.Round(), now)
        self.plans += [action.plan for action in actions if isinstance(action, ev.SendPlan)]
        self.sent += [action for action in actions if not isinstance(action, ev.SendPlan)]

    def submit(self, name: str, tokens: int, now: float = 0.0, prompt: int = 10) -> None:
        """A request with this expected output and max_tokens 1,000."""
        request = Request(name, "demo", prompt, 1_000, now)
        self.step(ev.Submitted(G, request), now)
        forecast = Forecast((float(tokens),), (1.0,), 1_000, "retrieval")
        self.step(ev.Forecasted(((name, forecast),)), now)

    def report(self, now: float, applied: int = 99, on: str = "w0", **what: Any) -> None:
        self.reports += 1
        report = Report(self.reports, applied, **what)
        self.step(ev.Reported(f"{on}#1", on, report), now)

    def progress(self, name: str, output: int, now: float, prompt: int = 10) -> None:
        self.report(now, progress=(RequestProgress(name, output, prompt + output),))

    def row(self, name: str) -> int:
        return int(self.state.jobs[name].row)

    def home(self, name: str) -> str:
        return str(self.state.ledger.home(self.state.jobs[name]))

    def at_front(self) -> set[str]:
        return {name for name, level in self.levels().items() if level == FRONT}

    def homes(self) -> dict[str, tuple[str, int]]:
        """The home of each request, and its KV tokens there."""
        ledger = self.state.ledger
        return {n: (ledger.home(job), ledger.held(job)) for n, job in self.state.jobs.items()}

    def remembered(self, column: str) -> dict[str, float]:
        """The order's memory of each request."""
        rows = np.array([self.row(name) for name in self.state.jobs], np.int64)
        serials = self.state.ledger.board.jobs.serial[rows]
        (known,) = self.state.rounds.memory.recall([column], rows, serials)
        return dict(zip(self.state.jobs, known.tolist(), strict=True))

    def ranked(self) -> Ranking:
        """The current rank of every request."""
        state = self.state
        snapshot = state.ledger.board.snapshot(self.now, state.ledger.worker_snapshots())
        return rank_requests(snapshot, state.preset, state.rounds.memory)

    def remaining_s(self, name: str) -> float:
        ranking = self.ranked()
        return float(ranking.remaining_s[ranking.rows == self.row(name)][0])

    def levels(self) -> dict[str, int]:
        ranking = self.ranked()
        levels = np.floor(ranking.key / LEVEL).astype(int).tolist()
        by_row = dict(zip(ranking.rows.tolist(), levels, strict=True))
        return {name: by_row[self.row(name)] for name in self.state.jobs}

    @property
    def running(self) -> list[str]:
        return [name for w in self.state.workers.values() for name in w.running]

    @property
    def queued(self) -> list[str]:
        """Waiting requests in queue order."""
        ranking = self.ranked()
        rows = ranking.queued[np.argsort(ranking.key[: ranking.split], kind="stable")]
        return list(self.state.ledger.names(rows))
