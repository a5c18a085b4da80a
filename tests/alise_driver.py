"""A scheduler's state that a test speaks to: events in, plans and actions kept."""

from typing import Any

import pytest
from services.scheduler.presets import choose

from services.core import CostModel, Plan, Progress, Report, Request, WorkerView
from services.forecast import Forecast
from services.scheduler import events as ev
from services.scheduler.state import SchedulerState

G = "gateway#1"
# A token takes 10 ms of a worker's time, whoever runs beside it; nothing else takes any. So with
# base_s 0.5 the levels end at 50, 100, 200, 400 … tokens.
COST = CostModel(0.0, 0.0, 0.01, 0.0, offload_token_s=0.001, upload_token_s=0.002)


def about(expected: Any) -> Any:
    """Untyped, so that it may stand in a value."""
    return pytest.approx(expected)


class Driver:
    """A state and what is said to it; answers `AskBatch` with as many as fit in memory by what
    they hold, and keeps the plans."""

    def __init__(self, policy: str = "alise", memory: int = 300, places: int = 8, **choices: Any):
        self.state: Any = SchedulerState(choose(policy, {"base_s": 0.5} | choices))
        self.plans: list[Plan] = []
        self.asked: list[ev.AskBatch] = []
        self.told: list[ev.Action] = []
        self.reports = 0
        self.memory: dict[str, int] = {}  # in tokens; less than what the longest might need
        self.attach("w0", memory, places)

    def attach(self, name: str, memory: int = 300, places: int = 8) -> None:
        self.memory[name] = memory
        view = WorkerView(name, f"unix:/{name}", "demo", 10_000, 16, places, 5_000)
        self.step(ev.WorkerAttached(f"{name}#1", view), 0.0)
        self.step(ev.Costed(name, COST), 0.0)

    def step(self, event: ev.Event, now: float) -> None:
        actions = self.state.step(event, now)
        self.plans += [action.plan for action in actions if isinstance(action, ev.SendPlan)]
        asked = [action for action in actions if isinstance(action, ev.AskBatch)]
        self.told += [a for a in actions if not isinstance(a, ev.SendPlan | ev.AskBatch)]
        self.asked += asked
        for problem in asked:
            batches = tuple(ev.Batch(g.worker_id, self.fitting(g)) for g in problem.groups)
            self.step(ev.Formed(problem.round, batches), now)

    def submit(self, name: str, tokens: int, now: float = 0.0, prompt: int = 10) -> None:
        """A request that is foreseen to make so many tokens, and may make 1,000."""
        request = Request(name, "demo", prompt, 1_000, now)
        self.step(ev.Submitted(G, request), now)
        forecast = Forecast((float(tokens),), (1.0,), 1_000, "retrieval")
        self.step(ev.Forecasted(((name, forecast),)), now)

    def report(self, now: float, applied: int = 99, on: str = "w0", **what: Any) -> None:
        self.reports += 1
        report = Report(self.reports, applied, **what)
        self.step(ev.Reported(f"{on}#1", on, report), now)

    def progress(self, name: str, output: int, now: float, prompt: int = 10) -> None:
        self.report(now, progress=(Progress(name, output, prompt + output),))

    def fitting(self, group: ev.Group) -> int:
        """The batcher's aggressive rule, without a watermark."""
        held = sum(group.running.prompt_tokens) + sum(group.running.output_tokens)
        places = group.max_running - len(group.running.prompt_tokens)
        rows = zip(group.queued.prompt_tokens, group.queued.output_tokens, strict=True)
        for at, row in enumerate(rows):
            held += sum(row)
            if held > self.memory[group.worker_id] or at == places:
                return at
        return len(group.queued.prompt_tokens)

    def levels(self) -> dict[str, int]:
        return {name: job.rank.level for name, job in self.state.jobs.items()}

    @property
    def running(self) -> list[str]:
        return [name for w in self.state.workers.values() for name in w.running]

    @property
    def queued(self) -> list[str]:
        return [job.request_id for job in self.state.ledger.queue]
