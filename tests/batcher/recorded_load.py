"""A load as a list of events, recorded from a scheduler that arranges rounds in process, to replay
on one that has a batcher arrange its rounds."""

from dataclasses import dataclass, field

import numpy as np

from services.core import Completion, FinishReason, Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import UNCAPPED, Forecast
from services.policies.preset import Preset
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState

BLOCK = 16
STEP_S = 0.05
TOKENS_A_STEP = 8
KV_TOKENS = {"w0": 320, "w1": 640, "w2": 320}
MODELS = {"w0": "demo", "w1": "demo", "w2": "other"}
RecordedStep = tuple[ev.Event, float, list[ev.Action]]


@dataclass
class Here:
    """A request at a worker."""

    limit: int
    made: int = 0
    runs: bool = True


@dataclass
class Worker:
    """Follows its plans with one report per step; evicts its victims when memory is short."""

    name: str
    here: dict[str, Here] = field(default_factory=dict)
    victims: tuple[str, ...] = ()
    plan_seq: int = 0
    reports: int = 0


class Recorder:
    """Requests of two models with known forecasts; a third of them share one population. Its
    forecast is refreshed from time to time."""

    def __init__(self, preset: Preset, requests: int = 80, seed: int = 0):
        self.state = SchedulerState(preset)
        self.recorded: list[RecordedStep] = []
        self.now = 0.0
        self.rng = np.random.default_rng(seed)
        self.workers = {name: Worker(name) for name in KV_TOKENS}
        self.requests: dict[str, tuple[Request, int]] = {}
        for name, kv in KV_TOKENS.items():
            view = WorkerView(name, name, MODELS[name], kv, BLOCK, 10, 300)
            self.step(ev.WorkerAttached(f"{name}#1", view))
            self.step(ev.Costed(name, CostModel(0.02, 1e-4, 5e-4, 1e-7)))
        self._run(requests)

    def _run(self, requests: int) -> None:
        made = 0
        for step in range(2_000):
            for _ in range(min(requests - made, int(self.rng.integers(0, 4)))):
                self._submit(made)
                made += 1
            if step % 20 == 0:
                self.step(ev.Refreshed((self._shared(step),)))
            if self.state.next_deadline() <= self.now:
                self.step(ev.Tick())
            self._round()
            for worker in self.workers.values():
                self._work(worker)
            self._round()
            self.now += STEP_S
            if made == requests and not self.state.jobs:
                return
        raise AssertionError(f"{len(self.state.jobs)} never ended")

    def step(self, event: ev.Event) -> None:
        actions = self.state.step(event, self.now)
        self.recorded.append((event, self.now, actions))
        for action in actions:
            if isinstance(action, ev.SendPlan):
                self._apply(action)

    def _round(self) -> None:
        if self.state.round_due_s <= self.now:
            self.step(ev.Round())

    def _submit(self, number: int) -> None:
        name, most = f"r{number}", 200
        length = int(min(180, 1 + self.rng.exponential(70)))
        model = "other" if number % 4 == 0 else "demo"
        request = Request(name, model, int(self.rng.integers(5, 80)), most, self.now)
        self.requests[name] = request, length
        self.step(ev.Submitted("g#1", request))
        # All forecasts differ, so that the points identify each one.
        expected = Forecast((length + 0.25 + number / 1_000, 190.0), (0.8, 0.2), most, "retrieval")
        forecast = self._shared(0) if number % 3 == 0 else expected
        self.step(ev.Forecasted(((name, forecast),)))

    def _shared(self, version: int) -> Forecast:
        points = (10.0 + version / 100, 80.0, float(UNCAPPED))
        return Forecast(points, (0.6, 0.3, 0.1), UNCAPPED, "history", version, "history/demo")

    def _apply(self, action: ev.SendPlan) -> None:
        worker, plan = self.workers[action.worker_id], action.plan
        assert plan.seq == worker.plan_seq + 1
        worker.plan_seq, worker.victims = plan.seq, plan.victims
        for name in plan.cancel:
            worker.here.pop(name, None)
        for pause in plan.pause:
            worker.here[pause.request_id].runs = False
        for grant in plan.admit:
            here = worker.here.setdefault(grant.request_id, Here(grant.limit_tokens))
            here.runs, here.limit = True, grant.limit_tokens
        for grant in plan.extend:
            worker.here[grant.request_id].limit = grant.limit_tokens

    def _work(self, worker: Worker) -> None:
        finished = []
        for name, here in list(worker.here.items()):
            if here.runs:
                length = self.requests[name][1]
                here.made = min(here.made + TOKENS_A_STEP, here.limit, length)
                if here.made == length:
                    finished.append(Completion(name, length, FinishReason.STOP))
                    del worker.here[name]
        evicted = []
        for name in worker.victims:
            if self._held(worker) > KV_TOKENS[worker.name]:
                victim = worker.here.get(name)
                if victim and victim.runs:
                    victim.runs = False
                    evicted.append(RequestProgress(name, victim.made, 0))
        if worker.here or finished:
            worker.reports += 1
            progress = tuple(
                RequestProgress(name, here.made, tokens, tokens // BLOCK)
                for name, here in worker.here.items()
                if here.runs and (tokens := self._tokens(name, here))
            )
            free = max(0, KV_TOKENS[worker.name] - self._held(worker)) // BLOCK
            report = Report(
                worker.reports, worker.plan_seq, progress, tuple(finished), tuple(evicted),
                free_blocks=free,
            )  # fmt: skip
            self.step(ev.Reported(f"{worker.name}#1", worker.name, report))

    def _tokens(self, name: str, here: Here) -> int:
        return -(-(self.requests[name][0].prompt_tokens + here.made) // BLOCK) * BLOCK

    def _held(self, worker: Worker) -> int:
        return sum(self._tokens(name, here) for name, here in worker.here.items() if here.runs)
