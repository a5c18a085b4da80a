"""A simulated worker in virtual time, to measure the scheduler's whole effect under load."""

from collections import Counter
from dataclasses import dataclass, field

from services.core import Completion, FinishReason, Report, Request, RequestProgress, WorkerView
from services.costs import CostModel
from services.forecast import Forecast
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState

COST = CostModel(0.02, 0.0001, 0.0005, 0.0)
REPORT_STEPS = 16


@dataclass
class Ask:
    """A request of the load, with its true output length."""

    name: str
    arrival_s: float
    prompt: int
    length: int
    expected: float


@dataclass
class Here:
    """A request at the worker: its output, its KV tokens and its limit."""

    ask: Ask
    limit: int
    made: int = 0
    held: int = 0
    runs: bool = True


@dataclass
class LoadResult:
    """Outcome of a simulated load."""

    ended_s: dict[str, float] = field(default_factory=dict)
    first_s: dict[str, float] = field(default_factory=dict)
    preemptions: Counter[str] = field(default_factory=Counter)
    longest_away_s: dict[str, float] = field(default_factory=dict)
    evictions: int = 0
    steps: list[tuple[float, int]] = field(default_factory=list)  # time of its end, output tokens

    def tokens_by(self, now: float) -> int:
        return sum(tokens for ended_s, tokens in self.steps if ended_s <= now)


class Load:
    """One simulated worker. Rounds take no time and follow every event. Under `swap` KV moves to
    host memory and back at no cost; otherwise an evicted request loses it, and under `recompute`
    a paused one, too."""

    def __init__(
        self, policy: str, asks: list[Ask], kv_tokens: int, places: int = 64, **choices: object
    ):
        self.state = SchedulerState(choose(policy, choices))
        self.asks = sorted(asks, key=lambda ask: ask.arrival_s)
        self.by_name = {ask.name: ask for ask in asks}
        self.kv_tokens = kv_tokens
        self.now = 0.0
        self.here: dict[str, Here] = {}
        self.victims: tuple[str, ...] = ()
        self.result = LoadResult()
        self.last_s: dict[str, float] = {}
        self._report_seq = self._plan_seq = 0
        self._planned = False
        self._dropped: list[RequestProgress] = []  # not reported yet
        view = WorkerView("w", "w", "demo", kv_tokens, 16, places, kv_tokens)
        self._step(ev.WorkerAttached("w#1", view))
        self._step(ev.Costed("w", COST))

    def run(self) -> LoadResult:
        """Runs until all requests have ended."""
        due, steps = list(self.asks), 0
        while due or self.state.jobs:
            while due and due[0].arrival_s <= self.now:
                self._submit(due.pop(0))
            if self.state.next_deadline() <= self.now:
                self._step(ev.Tick())
            running = [h for h in self.here.values() if h.runs and h.made < h.limit]
            if not running:
                waits = [ask.arrival_s for ask in due[:1]] + [self.state.next_deadline()]
                self.now = max(self.now, min(waits)) + 1e-6
                continue
            steps += 1
            self._work(running, steps % REPORT_STEPS == 0)
        return self.result

    def _submit(self, ask: Ask) -> None:
        most = min(1_024, self.kv_tokens - ask.prompt)
        request = Request(ask.name, "demo", ask.prompt, most, ask.arrival_s)
        self._step(ev.Submitted("g#1", request))
        expected = Forecast((ask.expected,), (1.0,), 1_024, "oracle")
        self._step(ev.Forecasted(((ask.name, expected),)))

    def _step(self, event: ev.Event) -> None:
        actions = self.state.step(event, self.now)
        if self.state.round_due_s <= self.now:
            actions += self.state.step(ev.Round(), self.now)
        for action in actions:
            match action:
                case ev.SendPlan():
                    self._apply(action)
                case ev.Preempt():
                    self.result.preemptions[action.request_id] += 1
                case _:
                    pass

    def _apply(self, action: ev.SendPlan) -> None:
        plan = action.plan
        for name in plan.cancel:
            self.here.pop(name, None)
        for pause in plan.pause:
            self.here[pause.request_id].runs = False
            if plan.residency == "recompute":
                self._dropped.append(self._drop(pause.request_id))
        for grant in plan.admit:
            ask = self.by_name[grant.request_id]
            here = self.here.setdefault(grant.request_id, Here(ask, grant.limit_tokens))
            here.runs, here.limit = True, grant.limit_tokens
        for grant in plan.extend:
            self.here[grant.request_id].limit = grant.limit_tokens
        self.victims = plan.victims
        self._plan_seq = max(self._plan_seq, plan.seq)
        self._planned = True

    def _work(self, running: list[Here], report: bool) -> None:
        """One step: missing KV is computed, and every running request generates a token."""
        missing = sum(h.ask.prompt + h.made - h.held for h in running)
        self.now += COST.step_s(missing, len(running), 0)
        self.result.steps.append((self.now, len(running)))
        ended = []
        sliced = False
        for here in running:
            here.made += 1
            here.held = here.ask.prompt + here.made
            name = here.ask.name
            away_s = self.now - self.last_s.get(name, here.ask.arrival_s)
            self.result.longest_away_s[name] = max(
                self.result.longest_away_s.get(name, 0.0), away_s
            )
            self.last_s[name] = self.now
            self.result.first_s.setdefault(name, self.now)
            if here.made == here.ask.length:
                ended.append(Completion(name, here.made, FinishReason.STOP))
                self.result.ended_s[name] = self.now
                del self.here[name]
            sliced |= here.made == here.limit
        evicted = [*self._dropped, *self._evict()]
        self._dropped.clear()
        if ended or evicted or sliced or report or self._planned:
            self._report(ended, evicted)

    def _evict(self) -> list[RequestProgress]:
        fast = self.state.preset.residency == "defer"
        evicted = []
        for name in self.victims:
            if sum(h.held for h in self.here.values() if h.runs or fast) <= self.kv_tokens:
                break
            here = self.here.get(name)
            if here and here.runs:
                here.runs = False
                rests = self.state.preset.residency == "swap"
                evicted.append(
                    RequestProgress(name, here.made, here.held) if rests else self._drop(name)
                )
        self.result.evictions += len(evicted)
        return evicted

    def _drop(self, name: str) -> RequestProgress:
        self.here[name].held = 0
        return RequestProgress(name, self.here[name].made, 0)

    def _report(self, ended: list[Completion], evicted: list[RequestProgress]) -> None:
        self._report_seq += 1
        self._planned = False
        progress = tuple(
            RequestProgress(name, h.made, h.held) for name, h in self.here.items() if h.runs
        )
        report = Report(self._report_seq, self._plan_seq, progress, tuple(ended), tuple(evicted))
        self._step(ev.Reported("w#1", "w", report))
