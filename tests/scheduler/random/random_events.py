"""Random scheduler events in any order, as a hypothesis state machine."""

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.core import Completion, FinishReason, Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import UNCAPPED, Forecast, certain, from_lengths
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.story_recorder import StoryRecorder
from tests.scheduler.random.dumb_worker import DumbWorker

LINKS = ("g#1", "h#1")
SHARED = "history/demo"
LIMITS = SchedulerLimits(max_queue=20, adopt_s=10.0)


class RandomEvents(RuleBasedStateMachine):
    """A scheduler and its story recorder, two simulated workers and two gateways. Every action is
    carried out and every plan is checked."""

    policy = "past-future"
    apart = False

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.names = 0
        self.most: dict[str, int] = {}
        self.asked: dict[str, Request] = {}
        self.live: set[str] = set()
        self.ended: Counter[str] = Counter()
        self.workers = {"w0": DumbWorker(), "w1": DumbWorker()}
        self.to_announce: dict[str, str] = {}  # after a scheduler restart: request to its worker
        self.calm = 0  # steps since a loss; losses are rare so that requests make progress
        self.reset()

    def reset(self) -> None:
        self.state = SchedulerState(choose(self.policy), LIMITS, self.apart)
        self.recorder = StoryRecorder(8)
        self.unforecast: list[str] = []
        self.forecasts: dict[str, str] = {}  # request to its population, if any
        self.answer: ev.Arranged | None = None  # the batcher's answer to the pending round
        self.stale: ev.Arranged | None = None
        self.forecast_sent: set[str] = set()

    def step(self, event: ev.Event, takes_s: float = 0.1) -> None:
        self.now += takes_s
        self.calm += 1
        actions = self.state.step(event, self.now)
        self.recorder.observe(self.state.last_step, self.state)
        for action in actions:
            match action:
                case ev.AskForecast():
                    self.unforecast += [r.request_id for r in action.requests]
                case ev.AskArrange():
                    self.ask_batcher(action)
                case ev.SendPlan():
                    self.workers[action.worker_id].apply(action, self.most)
                    self.check_plan(action)
                case ev.SendForecast():
                    self.check_forecast_update(action)
                case ev.SendLengthBound():
                    asked = self.asked[action.request_id]
                    assert asked.length_quantile
                    assert 0 < action.output_tokens < asked.max_tokens
                case ev.Finish() | ev.Refuse():
                    self.ended[action.request_id] += 1
                    self.live.discard(action.request_id)
                case _:
                    pass

    def ask_batcher(self, action: ev.AskArrange) -> None:
        """The batcher arranges the present candidates; its answer arrives later."""
        assert self.answer is None
        candidates = self.state.rounds.candidates
        assert candidates is not None and candidates.round == action.round
        decision = self.state.rounds.arrange(candidates)
        workers = tuple(
            ev.WorkerDecisionRow(
                s.worker,
                tuple(s.run.tolist()),
                tuple(s.limits.tolist()),
                tuple(s.pause.tolist()),
                tuple(s.victims.tolist()),
                s.peak_tokens,
            )
            for s in decision.workers
        )
        self.answer = ev.Arranged(action.round, workers, decision.next_s, decision.not_before_s)

    def check_plan(self, action: ev.SendPlan) -> None:
        """Victims are all our running requests. The order lists these and the paused ones there,
        each once and with a valid wait. A pending round does not include later arrivals; the next
        plan cancels a request if its deadline passed with the round."""
        worker = self.state.workers[action.worker_id]
        gone = set(worker.draft.cancel)
        order = [name for name in action.plan.order.request_ids if name not in gone]
        victims = set(action.plan.victims) - gone
        ours = set(worker.running)
        resting = {n for n in self.at(action.worker_id) - ours if self.held(n)}
        assert len(set(order)) == len(order)
        assert victims <= ours
        assert set(order) <= ours | resting
        if not self.apart:
            assert victims == ours
        if not self.state.preset.keeps_kv:
            assert order == []
            return
        if not self.apart:
            assert set(order[: len(ours)]) == ours
            assert set(order[len(ours) :]) == resting
        waits = dict(action.plan.order)
        assert all(waits[name] == 0.0 for name in ours & set(waits))
        assert all(0 <= wait < inf for wait in waits.values())

    def check_forecast_update(self, action: ev.SendForecast) -> None:
        """Only requests with a forecast get updates; a TTFT promise comes at most once."""
        job = self.state.jobs.get(action.request_id)
        if job is None:
            return  # its deadline passed in the same step
        assert job.request.include_forecast and action.link == job.link
        assert action.forecast == job.forecast
        assert 0 < action.token_s < inf
        if action.ttft_s is not None:
            assert 0 < action.ttft_s < inf
            assert action.request_id not in self.forecast_sent
        self.forecast_sent.add(action.request_id)

    def at(self, worker: str) -> set[str]:
        ledger = self.state.ledger
        return {name for name, job in self.state.jobs.items() if ledger.home(job) == worker}

    def held(self, name: str) -> int:
        return self.state.ledger.held(self.state.jobs[name])

    # Requests

    @rule(
        count=st.integers(1, 4),
        prompt=st.integers(1, 60),
        most=st.integers(1, 36),
        link=st.sampled_from(LINKS),
        wait_s=st.sampled_from([inf, inf, 0.5, 5.0]),
        model=st.sampled_from(["demo"] * 9 + ["other"]),
    )
    def submit(
        self, count: int, prompt: int, most: int, link: str, wait_s: float, model: str
    ) -> None:
        for _ in range(count):
            self.names += 1
            deadline_s = self.now + wait_s
            name = f"r{self.names}"
            asks = self.names % 2 == 0
            request = Request(
                name, model, prompt, most, self.now, include_forecast=asks, length_quantile=asks / 2
            )
            self.send(link, replace(request, deadline_s=deadline_s))

    @rule(link=st.sampled_from(LINKS), lengths=st.sampled_from([(0, 5), (5, 0), (5, 2**31)]))
    def submit_nonsense(self, link: str, lengths: tuple[int, int]) -> None:
        self.names += 1
        self.send(link, Request(f"r{self.names}", "demo", *lengths, self.now))
        assert f"r{self.names}" not in self.live

    def send(self, link: str, request: Request) -> None:
        name = request.request_id
        self.live.add(name)
        self.forecast_sent.discard(name)  # the scheduler treats a resubmission as a new request
        self.most[name], self.asked[name] = request.max_tokens, request
        self.forecasts.pop(name, None)
        self.step(ev.Submitted(link, request))

    @precondition(lambda self: self.unforecast)
    @rule(shared=st.booleans(), tokens=st.sampled_from([1, 30, 300]))
    def forecast(self, shared: bool, tokens: int) -> None:
        names, self.unforecast = self.unforecast, []
        self.add_forecast(names, shared, tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), shared=st.booleans(), tokens=st.sampled_from([1, 30, 300]))
    def improve(self, data: st.DataObject, shared: bool, tokens: int) -> None:
        """An improved forecast at any time, also for ended requests."""
        name = data.draw(st.sampled_from(sorted(self.live)))
        self.add_forecast([name, "gone"], shared, tokens)

    def add_forecast(self, names: list[str], shared: bool, tokens: int) -> None:
        made = self.history(40) if shared else certain(tokens)
        self.forecasts |= dict.fromkeys(names, made.shared_key)
        self.step(ev.Forecasted(tuple((name, made) for name in names)))

    def history(self, longest: int) -> Forecast:
        return from_lengths([3, longest], UNCAPPED, "history", 1, SHARED)

    @rule(longest=st.sampled_from([4, 50]))
    def refresh(self, longest: int) -> None:
        self.step(ev.Refreshed((self.history(longest),)))

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
        lost = {n for n, job in self.state.jobs.items() if job.link == link}
        self.to_announce = {n: self.state.ledger.home(self.state.jobs[n]) for n in lost}
        self.live -= lost
        self.step(ev.GatewayLost(link))

    # Rounds

    @rule()
    def round(self) -> None:
        """Run a round, due or not."""
        self.step(ev.Round())

    @precondition(lambda self: self.answer)
    @rule(missing=st.booleans())
    def arranged(self, missing: bool) -> None:
        answer, self.answer = self.answer, None
        assert answer is not None
        self.stale = answer
        self.step(ev.Arranged(answer.round, None) if missing else answer)

    @precondition(lambda self: self.answer and self.live)
    @rule(data=st.data(), link=st.sampled_from(LINKS))
    def take_a_row(self, data: st.DataObject, link: str) -> None:
        """A request ends and another takes its row while a round is pending."""
        self.cancel(data)
        self.submit(1, 10, 20, link, inf, "demo")
        self.forecast(shared=False, tokens=30)

    @precondition(lambda self: self.stale)
    @rule()
    def arranged_again(self) -> None:
        """An answer arrives after its round was arranged in process."""
        out = self.state.rounds.candidates
        assert self.stale is not None
        self.step(self.stale)
        assert self.state.rounds.candidates is out

    # Workers

    @initialize()
    def begin(self) -> None:
        self.attach("w0", 96, True)

    @precondition(lambda self: any(not w.link for w in self.workers.values()) or self.calm > 20)
    @rule(
        worker=st.sampled_from(["w0", "w1"]), size=st.sampled_from([96, 192]), keeps=st.booleans()
    )
    def attach(self, worker: str, size: int, keeps: bool) -> None:
        """A worker attaches for the first time, attaches again with its requests, or displaces the
        one with its name."""
        known = self.workers[worker]
        self.calm = 0 if known.link else self.calm
        again = DumbWorker(f"{worker}#{self.now}", size)
        if keeps:
            again.running, again.paused = known.running, known.paused
        self.workers[worker] = again
        view = WorkerView(worker, worker, "demo", size, 16, 4, 500)
        self.step(ev.WorkerAttached(again.link, view, again.held(self.most)))
        self.step(ev.Costed(worker, CostModel(0.05, 0.01, 0.05, 0.0)))

    @precondition(lambda self: any(w.link for w in self.workers.values()) and self.calm > 20)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.calm = 0
        here = sorted(name for name, worker in self.workers.items() if worker.link)
        name = data.draw(st.sampled_from(here))
        link, self.workers[name].link = self.workers[name].link, ""
        self.step(ev.WorkerLost(link, name))

    @precondition(lambda self: any(w.link for w in self.workers.values()) and self.calm > 20)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """A worker starts to drain; it may detach, stay for long, or attach again."""
        self.calm = 0
        here = sorted(name for name, worker in self.workers.items() if worker.link)
        name = data.draw(st.sampled_from(here))
        self.step(ev.WorkerDraining(self.workers[name].link, name, 30.0))
        self.workers[name].draining = True

    @precondition(lambda self: self.calm > 10)
    @rule(back=st.sampled_from([(), ("w0",), ("w0", "w1")]))
    def restart(self, back: tuple[str, ...]) -> None:
        """A restarted scheduler has no state; workers and gateways keep theirs. Some workers attach
        at once, the others later."""
        self.calm = 0
        jobs, ledger = self.state.jobs, self.state.ledger
        self.to_announce = {name: ledger.home(job) for name, job in jobs.items()}
        self.live.clear()
        self.reset()
        for worker in self.workers.values():
            worker.link = ""
        for name in back:
            self.attach(name, self.workers[name].size, True)

    @precondition(lambda self: self.to_announce)
    @rule(data=st.data(), link=st.sampled_from(LINKS), delivered=st.integers(0, 2))
    def announce(self, data: st.DataObject, link: str, delivered: int) -> None:
        """A gateway submits a request again and names its worker."""
        name = data.draw(st.sampled_from(sorted(self.to_announce)))
        home, old = self.to_announce.pop(name), self.asked[name]
        request = Request(
            name,
            old.model,
            old.prompt_tokens,
            old.max_tokens,
            old.arrival_s,
            delivered_tokens=min(delivered, old.max_tokens - 1),
            worker_id=home,
            include_forecast=old.include_forecast,
            length_quantile=old.length_quantile,
        )
        self.send(link, request)

    def busy(self, paused: bool = False) -> dict[str, list[str]]:
        """The running and paused requests of each attached worker."""
        all_of = {
            name: sorted(worker.paused if paused else worker.running)
            for name, worker in self.workers.items()
            if worker.link
        }
        return {name: names for name, names in all_of.items() if names}

    @precondition(lambda self: self.busy())
    @rule(
        data=st.data(),
        what=st.sampled_from(["progress", "finished", "evicted"]),
        output=st.integers(1, 40),
        held=st.sampled_from([0, 10]),
    )
    def report(self, data: st.DataObject, what: str, output: int, held: int) -> None:
        busy = self.busy()
        worker = data.draw(st.sampled_from(sorted(busy)))
        name = data.draw(st.sampled_from(busy[worker]))
        reports: dict[str, Any] = {
            "progress": RequestProgress(name, output, 10, 1),
            "finished": Completion(name, output, FinishReason.STOP),
            "evicted": RequestProgress(name, output, held),
        }
        if what != "progress":
            self.workers[worker].running.discard(name)
        if what == "evicted":
            self.workers[worker].paused.add(name)
        report: Any = {what: (reports[what],)}
        self.tell(worker, **report)

    @precondition(lambda self: self.busy())
    @rule(output=st.integers(0, 40), tokens=st.sampled_from([1, 60]))
    def serve(self, output: int, tokens: int) -> None:
        """All running requests make progress; pending forecasts and rounds are answered."""
        if self.unforecast:
            self.forecast(shared=False, tokens=tokens)
        for worker, names in self.busy().items():
            self.tell(worker, progress=tuple(RequestProgress(n, output, 10, 1) for n in names))
        for _ in range(2):
            self.step(ev.Round())
            if self.answer:
                self.arranged(missing=False)

    @precondition(lambda self: self.busy(paused=True))
    @rule(data=st.data(), late=st.booleans(), held=st.sampled_from([0, 10]))
    def report_paused(self, data: st.DataObject, late: bool, held: int) -> None:
        """Reports about a paused request: a last token, or KV dropped or moved to host memory;
        `late` by a worker that has not applied the pause."""
        paused = self.busy(paused=True)
        worker = data.draw(st.sampled_from(sorted(paused)))
        name = data.draw(st.sampled_from(paused[worker]))
        what = data.draw(st.sampled_from(["progress", "evicted"]))
        report: Any = {what: (RequestProgress(name, 2, held),)}
        self.tell(worker, late, **report)

    def tell(self, name: str, late: bool = False, **what: Any) -> None:
        worker = self.workers[name]
        worker.reports += 1
        report = Report(worker.reports, worker.applied - late, **what)
        self.step(ev.Reported(worker.link, name, report))

    @rule(takes_s=st.sampled_from([0.1, 5.0, 60.0]))
    def tick(self, takes_s: float) -> None:
        self.step(ev.Tick(), takes_s)
