"""The scheduler under random events, against what must hold whatever happens."""

from collections import Counter
from math import inf
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from services.core import (
    Completion,
    CostModel,
    FinishReason,
    Progress,
    Report,
    Request,
    Residency,
    WorkerView,
)
from services.forecast import certain, from_lengths
from services.policies.preset import choose
from services.scheduler import events as ev
from services.scheduler.jobs import Phase
from services.scheduler.ledger import Limits
from services.scheduler.state import SchedulerState

LINKS = ("g#1", "h#1")


class Workers:
    """What dumb workers would hold if they did just what plans say: who runs, and who was paused
    or evicted and is still there."""

    def __init__(self) -> None:
        self.running: dict[str, set[str]] = {}
        self.paused: dict[str, set[str]] = {}
        self.applied: dict[str, int] = {}

    def attach(self, worker: str) -> None:
        self.running[worker], self.paused[worker], self.applied[worker] = set(), set(), 0

    def apply(self, action: ev.SendPlan) -> None:
        mine, paused = self.running[action.worker_id], self.paused[action.worker_id]
        plan = action.plan
        assert plan.seq == self.applied[action.worker_id] + 1
        self.applied[action.worker_id] = plan.seq
        mine -= set(plan.cancel)
        paused -= set(plan.cancel)
        for pause in plan.pause:
            assert pause.residency is Residency.KEEP
            mine.remove(pause.request_id)
            paused.add(pause.request_id)
        for grant in plan.admit:
            assert grant.request_id not in mine
            mine.add(grant.request_id)
            paused.discard(grant.request_id)
        assert set(plan.victims) == mine


class SchedulerMachine(RuleBasedStateMachine):
    policy = "past-future"

    def __init__(self) -> None:
        super().__init__()
        self.state = SchedulerState(choose(self.policy), Limits(max_queue=20, offer_window=6))
        self.now = 0.0
        self.names = 0
        self.live: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.workers = Workers()
        self.links: dict[str, str] = {}
        self.reports: Counter[str] = Counter()
        self.unformed: list[ev.AskBatch] = []
        self.unforecast: list[str] = []
        self.calm = 0  # steps since a loss: losses are rare, or nothing would ever come of a run

    def step(self, event: ev.Event, takes_s: float = 0.1) -> None:
        self.now += takes_s
        self.calm += 1
        for action in self.state.step(event, self.now):
            match action:
                case ev.AskForecast():
                    self.unforecast += [r.request_id for r in action.requests]
                case ev.AskBatch():
                    self.unformed.append(action)
                case ev.SendPlan():
                    self.workers.apply(action)
                    self.check_order(action)
                case ev.Finish() | ev.Refuse():
                    self.ended[action.request_id] += 1
                    self.live.discard(action.request_id)
                case _:
                    pass

    def check_order(self, action: ev.SendPlan) -> None:
        """Who runs, then who rests there, each once and with a wait that can be."""
        order = [standing.request_id for standing in action.plan.order]
        worker = self.state.workers[action.worker_id]
        rests = {j.request_id for j in self.state.jobs.values() if j.home == action.worker_id}
        if not self.state.preset.keeps_kv:
            assert order == []
            return
        assert len(set(order)) == len(order)
        assert set(order[: len(worker.running)]) == set(worker.running)
        held = {name for name in rests if self.state.jobs[name].held_tokens}
        assert set(order[len(worker.running) :]) == held - set(worker.running)
        waits = [s.wait_s for s in action.plan.order]
        assert waits[: len(worker.running)] == [0.0] * len(worker.running)
        assert all(0 <= wait < inf for wait in waits)

    @rule(
        count=st.integers(1, 4),
        prompt=st.integers(1, 60),
        most=st.integers(1, 60),
        link=st.sampled_from(LINKS),
        wait_s=st.sampled_from([inf, inf, 0.5, 5.0]),
    )
    def submit(self, count: int, prompt: int, most: int, link: str, wait_s: float) -> None:
        for _ in range(count):
            self.names += 1
            name = f"r{self.names}"
            self.live.add(name)
            deadline_s = self.now + wait_s
            request = Request(name, "demo", prompt, most, self.now, deadline_s=deadline_s)
            self.step(ev.Submitted(link, request))

    @precondition(lambda self: self.unforecast)
    @rule(shared=st.booleans(), tokens=st.sampled_from([1, 30, 300]))
    def forecast(self, shared: bool, tokens: int) -> None:
        made = (
            from_lengths([3, 40], 40, "history", 1, "history/demo") if shared else certain(tokens)
        )
        self.step(ev.Forecasted(tuple((name, made) for name in self.unforecast)))
        self.unforecast = []

    @precondition(lambda self: self.unformed)
    @rule(share=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0]), fails=st.booleans())
    def form(self, share: float, fails: bool) -> None:
        problem = self.unformed.pop(0)
        batches = tuple(
            ev.Batch(g.worker_id, round(share * len(g.queued.prompt_tokens)))
            for g in problem.groups
        )
        fails &= share == 0.0
        self.step(ev.Formed(problem.round, () if fails else batches))

    @initialize()
    def begin(self) -> None:
        self.attach("w0", 100)

    @precondition(lambda self: len(self.links) < 2 or self.calm > 20)
    @rule(worker=st.sampled_from(["w0", "w1"]), size=st.sampled_from([100, 200]))
    def attach(self, worker: str, size: int) -> None:
        self.calm = 0 if worker in self.links else self.calm
        self.links[worker] = f"{worker}#{self.now}"
        self.workers.attach(worker)
        self.reports[worker] = 0
        view = WorkerView(worker, worker, "demo", size, 16, 4, 500)
        self.step(ev.WorkerAttached(self.links[worker], view))
        self.step(ev.Costed(worker, CostModel(0.05, 0.01, 0.05, 0.0)))

    @precondition(lambda self: self.links and self.calm > 20)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.calm = 0
        worker = data.draw(st.sampled_from(sorted(self.links)))
        link = self.links.pop(worker)
        del self.workers.running[worker], self.workers.paused[worker]
        self.step(ev.WorkerLost(link, worker))

    @precondition(lambda self: any(self.workers.running.values()))
    @rule(
        data=st.data(),
        what=st.sampled_from(["progress", "finished", "evicted"]),
        output=st.integers(1, 40),
        held=st.sampled_from([0, 10]),
    )
    def report(self, data: st.DataObject, what: str, output: int, held: int) -> None:
        worker = data.draw(st.sampled_from([w for w, r in self.workers.running.items() if r]))
        name = data.draw(st.sampled_from(sorted(self.workers.running[worker])))
        told: dict[str, Any] = {
            "progress": Progress(name, output, 10),
            "finished": Completion(name, output, FinishReason.STOP),
            "evicted": Progress(name, output, held),
        }
        if what != "progress":
            self.workers.running[worker].discard(name)
        if what == "evicted":
            self.workers.paused[worker].add(name)
        news: Any = {what: (told[what],)}
        self.tell(worker, **news)

    @precondition(lambda self: any(self.workers.running.values()))
    @rule(output=st.integers(0, 40), tokens=st.sampled_from([1, 60]))
    def serve(self, output: int, tokens: int) -> None:
        """All that run get on, and all that is asked is answered with as many as there are."""
        if self.unforecast:
            self.forecast(shared=False, tokens=tokens)
        for worker, names in self.workers.running.items():
            self.tell(worker, progress=tuple(Progress(n, output, 10) for n in sorted(names)))
        while self.unformed:
            self.form(share=0.7 if len(self.unformed) > 1 else 1.0, fails=False)

    @precondition(lambda self: any(self.workers.paused.values()))
    @rule(data=st.data(), late=st.booleans(), held=st.sampled_from([0, 10]))
    def report_paused(self, data: st.DataObject, late: bool, held: int) -> None:
        """Of one that does not run there any more: a last token of it, or that its KV was
        dropped or taken to host memory; perhaps by a worker that has not read of its pause."""
        worker = data.draw(st.sampled_from([w for w, r in self.workers.paused.items() if r]))
        name = data.draw(st.sampled_from(sorted(self.workers.paused[worker])))
        what = data.draw(st.sampled_from(["progress", "evicted"]))
        news: Any = {what: (Progress(name, 2, held),)}
        self.tell(worker, late, **news)

    def tell(self, worker: str, late: bool = False, **what: Any) -> None:
        self.reports[worker] += 1
        report = Report(self.reports[worker], self.workers.applied[worker] - late, **what)
        self.step(ev.Reported(self.links[worker], worker, report))

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.live.discard(name)
        self.step(ev.Cancelled(self.state.jobs[name].link, name, FinishReason.CANCELLED, 0))

    @precondition(lambda self: self.calm > 20)
    @rule(link=st.sampled_from(LINKS))
    def lose_gateway(self, link: str) -> None:
        self.calm = 0
        self.live -= {n for n, job in self.state.jobs.items() if job.link == link}
        self.step(ev.GatewayLost(link))

    @rule(takes_s=st.sampled_from([0.1, 5.0, 60.0]))
    def tick(self, takes_s: float) -> None:
        self.step(ev.Tick(), takes_s)

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

    @invariant()
    def who_is_paused_waits_at_its_home(self) -> None:
        """What a worker keeps of a request is kept for it: its home is there."""
        for worker, paused in self.workers.paused.items():
            for name in paused & set(self.state.jobs):
                job = self.state.jobs[name]
                assert (job.home, job.phase) == (worker, Phase.QUEUED)

    @invariant()
    def the_queue_is_in_order(self) -> None:
        keys = [job.rank.key for job in self.state.ledger.queue]
        assert keys == sorted(keys)

    @invariant()
    def nobody_is_overdue(self) -> None:
        assert self.state.next_deadline() > self.now


class AliseMachine(SchedulerMachine):
    policy = "alise"


class DeferMachine(SchedulerMachine):
    policy = "alise-defer"


TestScheduler = SchedulerMachine.TestCase
TestAlise = AliseMachine.TestCase
TestDefer = DeferMachine.TestCase
TestScheduler.settings = TestAlise.settings = TestDefer.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None
)
