"""The scheduler under random events, against what must hold whatever happens."""

from collections import Counter
from math import inf
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.core import Completion, FinishReason, Progress, Report, Request, WorkerView
from services.forecast import certain, from_lengths
from services.scheduler import events as ev
from services.scheduler.jobs import Phase
from services.scheduler.ledger import Limits
from services.scheduler.presets import choose
from services.scheduler.state import SchedulerState

LINKS = ("g#1", "h#1")


class Workers:
    """What dumb workers would hold if they did just what plans say."""

    def __init__(self) -> None:
        self.running: dict[str, set[str]] = {}

    def apply(self, action: ev.SendPlan) -> None:
        mine = self.running[action.worker_id]
        mine |= {grant.request_id for grant in action.plan.admit}
        mine -= set(action.plan.cancel)
        assert set(action.plan.victims) == mine


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.state = SchedulerState(choose("past-future"), Limits(max_queue=20, offer_window=6))
        self.now = 0.0
        self.names = 0
        self.live: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.workers = Workers()
        self.links: dict[str, str] = {}
        self.reports: Counter[str] = Counter()
        self.unformed: list[ev.AskBatch] = []
        self.unforecast: list[str] = []

    def step(self, event: ev.Event) -> None:
        self.now += 0.1
        for action in self.state.step(event, self.now):
            match action:
                case ev.AskForecast():
                    self.unforecast += [r.request_id for r in action.requests]
                case ev.AskBatch():
                    self.unformed.append(action)
                case ev.SendPlan():
                    self.workers.apply(action)
                case ev.Finish() | ev.Refuse():
                    self.ended[action.request_id] += 1
                    self.live.discard(action.request_id)
                case _:
                    pass

    @rule(prompt=st.integers(1, 90), most=st.integers(1, 90), link=st.sampled_from(LINKS),
          wait_s=st.sampled_from([inf, 0.5, 5.0]))  # fmt: skip
    def submit(self, prompt: int, most: int, link: str, wait_s: float) -> None:
        self.names += 1
        name = f"r{self.names}"
        self.live.add(name)
        request = Request(name, "demo", prompt, most, self.now, deadline_s=self.now + wait_s)
        self.step(ev.Submitted(link, request))

    @precondition(lambda self: self.unforecast)
    @rule(shared=st.booleans())
    def forecast(self, shared: bool) -> None:
        made = from_lengths([3, 40], 40, "history", 1, "history/demo") if shared else certain(30)
        self.step(ev.Forecasted(tuple((name, made) for name in self.unforecast)))
        self.unforecast = []

    @precondition(lambda self: self.unformed)
    @rule(share=st.floats(0, 1), fails=st.booleans())
    def form(self, share: float, fails: bool) -> None:
        problem = self.unformed.pop(0)
        batches = tuple(
            ev.Batch(g.worker_id, round(share * len(g.queued.prompt_tokens)))
            for g in problem.groups
        )
        self.step(ev.Formed(problem.round, () if fails else batches))

    @rule(worker=st.sampled_from(["w0", "w1"]), size=st.sampled_from([100, 200]))
    def attach(self, worker: str, size: int) -> None:
        self.links[worker] = f"{worker}#{self.now}"
        self.workers.running[worker] = set()
        self.reports[worker] = 0
        view = WorkerView(worker, worker, "demo", size, 16, 4, 500)
        self.step(ev.WorkerAttached(self.links[worker], view))

    @precondition(lambda self: self.links)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker = data.draw(st.sampled_from(sorted(self.links)))
        link = self.links.pop(worker)
        del self.workers.running[worker]
        self.step(ev.WorkerLost(link, worker))

    @precondition(lambda self: any(self.workers.running.values()))
    @rule(data=st.data(), what=st.sampled_from(["progress", "finished", "evicted"]))
    def report(self, data: st.DataObject, what: str) -> None:
        worker = data.draw(st.sampled_from([w for w, r in self.workers.running.items() if r]))
        name = data.draw(st.sampled_from(sorted(self.workers.running[worker])))
        self.reports[worker] += 1
        told: dict[str, Any] = {
            "progress": Progress(name, 1, 10),
            "finished": Completion(name, 1, FinishReason.STOP),
            "evicted": Progress(name, 1, 0),
        }
        if what != "progress":
            self.workers.running[worker].discard(name)
        news: Any = {what: (told[what],)}
        report = Report(self.reports[worker], 0, **news)
        self.step(ev.Reported(self.links[worker], worker, report))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.live.discard(name)
        self.step(ev.Cancelled(self.state.jobs[name].link, name, FinishReason.CANCELLED, 0))

    @rule(link=st.sampled_from(LINKS))
    def lose_gateway(self, link: str) -> None:
        self.live -= {n for n, job in self.state.jobs.items() if job.link == link}
        self.step(ev.GatewayLost(link))

    @rule(shared=st.booleans())
    def tick(self, shared: bool) -> None:
        self.step(ev.Tick())

    @invariant()
    def every_request_is_live_or_has_ended_once(self) -> None:
        assert set(self.state.jobs) == self.live
        assert all(count == 1 for count in self.ended.values())

    @invariant()
    def every_live_request_is_in_one_place(self) -> None:
        queued = [job.request_id for job in self.state.ledger.queue]
        running = [name for w in self.state.workers.values() for name in w.running]
        waiting = [n for n, j in self.state.jobs.items() if j.phase is Phase.FORECASTING]
        assert sorted(queued + running + waiting) == sorted(self.live)

    @invariant()
    def workers_run_what_the_scheduler_believes(self) -> None:
        believed = {name: set(w.running) for name, w in self.state.workers.items()}
        assert believed == self.workers.running

    @invariant()
    def bounds_hold(self) -> None:
        assert len(self.state.ledger.queue) <= 20 + 2 * 4  # what two lost workers may give back
        for worker in self.state.workers.values():
            assert len(worker.running) <= worker.view.max_running
            for job in worker.running.values():
                total = job.request.prompt_tokens + job.request.max_tokens
                assert total <= worker.view.reach_tokens


SchedulerMachine.TestCase.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
TestScheduler = SchedulerMachine.TestCase
