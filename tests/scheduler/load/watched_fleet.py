"""Dumb workers in virtual time around a real scheduler, whose every round is looked at.

Each round is decided three times over: by the scheduler, by `decide` from a copy of the snapshot
and of the memory, and by a batcher's copy of the functions behind the codec. Workers make so many
tokens a tick, evict when blocks run out, and keep or drop KV as the preset's residency says; static
batches they run without lockstep, which concerns the worker and not the round.
"""

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from math import inf
from typing import Any

import numpy as np

from protos.generated import batcher_pb2
from services.core import (
    Completion,
    FinishReason,
    Report,
    Request,
    RequestProgress,
    Sla,
    WorkerView,
)
from services.costs import CostModel
from services.forecast import UNCAPPED, Forecast
from services.forecasttable import ForecastTable
from services.policies.decide import arrange, complete_decision, rank_requests, select_candidates
from services.policies.decision import Decision
from services.policies.preset import Preset
from services.policies.snapshot import Candidates, Snapshot
from services.runtime.codecs.arrange import (
    SentForecasts,
    decode_candidates,
    decode_hello,
    encode_candidates,
    encode_decision,
    encode_hello,
)
from services.scheduler.codec import decode_arrangement
from services.scheduler.core import events as ev
from services.scheduler.core.rounds import Rounds, decision_of
from services.scheduler.core.state import SchedulerState
from services.scheduler.links.arrangement_check import find_flaw

BLOCK = 16
TICK_S = 0.05
TOKENS = 4  # that each makes in a tick
MOST_TICKS = 3_000
REQUESTS = 60
COST = CostModel(0.02, 1e-4, 5e-4, 1e-7)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the last bit, arrays inside them included."""
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    if is_dataclass(a) and not isinstance(a, type):
        return type(a) is type(b) and all(
            same(getattr(a, each.name), getattr(b, each.name)) for each in fields(a)
        )
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


class Batcher:
    """One behind a stream: what it knows has crossed as bytes."""

    def __init__(self, preset: Preset, table: ForecastTable):
        hello = batcher_pb2.ArrangeMessage.FromString(encode_hello(preset).SerializeToString())
        self._preset = decode_hello(hello.hello)
        self._telling, self._table = SentForecasts(table), ForecastTable()

    def arrange(self, candidates: Candidates) -> Decision:
        data = encode_candidates(candidates, self._telling).SerializeToString()
        there = decode_candidates(
            batcher_pb2.ArrangeMessage.FromString(data).candidates, self._table
        )
        rng = np.random.default_rng(there.round)
        answer = encode_decision(arrange(there, self._table, self._preset, rng))
        back = batcher_pb2.Arrangement.FromString(answer.SerializeToString())
        arranged = decode_arrangement(back)
        assert find_flaw(candidates, arranged) == ""
        return decision_of(candidates, arranged)


@dataclass(frozen=True)
class Seen:
    """A round: what was asked and what was said."""

    snapshot: Snapshot
    candidates: Candidates
    decision: Decision


class Watched(Rounds):
    """Rounds that compare what they decide with what others would."""

    def __init__(self, state: SchedulerState):
        super().__init__(state.preset, state.ledger)
        self.seen: Seen | None = None
        self.count = 0
        self._batcher = Batcher(state.preset, state.ledger.board.forecasts)

    def decide(self, snapshot: Snapshot) -> Decision:
        copy = pickle.dumps((snapshot, self.memory))
        decision = super().decide(snapshot)
        snapshot, memory = pickle.loads(copy)
        ranking = rank_requests(snapshot, self.preset, memory)
        candidates = select_candidates(snapshot, ranking, self.preset, self.number)
        arranged = self._batcher.arrange(candidates)
        assert same(complete_decision(arranged, ranking), decision)
        self.seen = Seen(snapshot, candidates, decision)
        self.count += 1
        return decision


@dataclass
class Here:
    """A request at a worker."""

    limit: int
    held: int = 0
    runs: bool = True


@dataclass
class Seat:
    """A dumb worker."""

    view: WorkerView
    here: dict[str, Here] = field(default_factory=dict)
    victims: tuple[str, ...] = ()
    plan_seq: int = 0
    reports: int = 0
    dropped: list[RequestProgress] = field(default_factory=list)  # paused, and their KV is gone


@dataclass
class Life:
    """A request: how long its answer will be, and what there is of it."""

    request: Request
    length: int
    made: int = 0


class Fleet:
    """A random load on random workers; `run` drives it to its end, yielding every round seen."""

    def __init__(self, preset: Preset, seed: int):
        self.rng = np.random.default_rng(seed)
        self.preset = preset
        self.state = SchedulerState(preset)
        self.state.rounds = self.rounds = Watched(self.state)
        self.now = 0.0
        self.lives: dict[str, Life] = {}
        self.evictions = self.submitted = self.ended = 0
        self.seen: list[Seen] = []
        self.workers: dict[str, Seat] = {}
        for number in range(int(self.rng.integers(1, 4))):
            kv, places = int(self.rng.choice([192, 320, 640])), int(self.rng.choice([2, 6, 12]))
            view = WorkerView(f"w{number}", f"w{number}", "demo", kv, BLOCK, places, kv)
            self.workers[view.worker_id] = Seat(view)
            self._step(ev.WorkerAttached(f"w{number}#1", view))
            self._step(ev.Costed(view.worker_id, COST))

    def run(self) -> list[Seen]:
        """All rounds, once all have ended."""
        for tick in range(MOST_TICKS):
            if tick % 4 == 0:
                self._submit(int(self.rng.integers(0, 8)))
            if tick % 20 == 0:
                self._step(ev.Refreshed((self._shared(tick),)))
            self._round()
            for worker in self.workers.values():
                self._work(worker)
            self._round()
            self.now += TICK_S
            if self.submitted == REQUESTS and not self.state.jobs:
                return self.seen
        raise AssertionError(f"{len(self.state.jobs)} never ended")

    def _round(self) -> None:
        if self.state.next_deadline() <= self.now:
            self._step(ev.Tick())
        if self.state.round_due_s <= self.now:
            self._step(ev.Round())

    def _step(self, event: ev.Event) -> None:
        for action in self.state.step(event, self.now):
            if isinstance(action, ev.SendPlan):
                self._apply(self.workers[action.worker_id], action)
            elif isinstance(action, ev.Finish):
                self.ended += 1
            assert not isinstance(action, ev.Refuse)
        if self.rounds.seen:
            self.seen.append(self.rounds.seen)
            self.rounds.seen = None

    def _submit(self, count: int) -> None:
        for number in range(self.submitted, min(REQUESTS, self.submitted + count)):
            length = int(min(70, 1 + self.rng.exponential(20)))
            most = min(80, length + int(self.rng.integers(0, 30)))
            sla = [Sla(), Sla("standard", 5.0, 0.2), Sla("interactive", 0.5, 0.1)][number % 3]
            request = Request(
                f"r{number}", "demo", int(self.rng.integers(4, 90)), most, self.now,
                application=f"a{number % 4}", sla=sla,
            )  # fmt: skip
            self.lives[request.request_id] = Life(request, length)
            self._step(ev.Submitted("g#1", request))
            forecast = self._shared(0) if number % 3 == 0 else self._foreseen(length, most)
            self._step(ev.Forecasted(((request.request_id, forecast),)))
            self.submitted += 1

    def _foreseen(self, length: int, most: int) -> Forecast:
        """About right, or far from it."""
        about = float(np.clip(length * np.exp(0.6 * self.rng.normal()), 1, most - 0.5))
        return Forecast((about, float(most)), (0.8, 0.2), most, "made")

    def _shared(self, version: int) -> Forecast:
        points = (4.0 + version / 1_000, 25.0, float(UNCAPPED))
        return Forecast(points, (0.5, 0.4, 0.1), UNCAPPED, "history", version, "history/demo")

    def _apply(self, worker: Seat, action: ev.SendPlan) -> None:
        plan = action.plan
        assert plan.seq == worker.plan_seq + 1
        worker.plan_seq, worker.victims = plan.seq, plan.victims
        for name in plan.cancel:
            worker.here.pop(name, None)
        for pause in plan.pause:
            worker.here[pause.request_id].runs = False
            if self.preset.residency == "recompute":
                worker.dropped.append(self._drop(worker, pause.request_id))
        for grant in plan.admit:
            here = worker.here.setdefault(grant.request_id, Here(grant.limit_tokens))
            here.runs, here.limit = True, grant.limit_tokens
            worker.dropped = [
                drop for drop in worker.dropped if drop.request_id != grant.request_id
            ]
        for grant in plan.extend:
            worker.here[grant.request_id].limit = grant.limit_tokens

    def _work(self, worker: Seat) -> None:
        """One tick: memory is found, or made, before anything is computed."""
        if not worker.here and not worker.dropped:
            return
        evicted = worker.dropped + self._evict(worker)
        worker.dropped = []
        finished = []
        for name, here in list(worker.here.items()):
            if here.runs:
                life = self.lives[name]
                life.made = max(life.made, min(life.made + TOKENS, here.limit, life.length))
                here.held = life.request.prompt_tokens + life.made
                if life.made == life.length:
                    finished.append(Completion(name, life.length, FinishReason.STOP))
                    del worker.here[name]
        used = sum(_blocks(here.held) for here in self._on_device(worker))
        blocks = worker.view.kv_tokens // BLOCK
        assert used <= blocks
        worker.reports += 1
        progress = tuple(
            RequestProgress(name, self.lives[name].made, here.held, _blocks(here.held))
            for name, here in worker.here.items()
            if here.runs
        )
        report = Report(
            worker.reports, worker.plan_seq, progress, tuple(finished), tuple(evicted),
            free_blocks=blocks - used,
        )  # fmt: skip
        name = worker.view.worker_id
        self._step(ev.Reported(f"{name}#1", name, report))

    def _evict(self, worker: Seat) -> list[RequestProgress]:
        """By the plan's victims, until what this tick will hold fits."""
        evicted = []
        for name in worker.victims:
            needed = sum(
                _blocks(self._after(name, here)) if here.runs else _blocks(here.held)
                for name, here in worker.here.items()
                if here.runs or self._fast
            )
            if needed <= worker.view.kv_tokens // BLOCK:
                break
            here = worker.here.get(name)
            if here and here.runs:
                here.runs = False
                keeps = self.preset.residency in ("swap", "cost")
                evicted.append(self._progress(worker, name) if keeps else self._drop(worker, name))
        self.evictions += len(evicted)
        return evicted

    @property
    def _fast(self) -> bool:
        return self.preset.residency == "defer"

    def _on_device(self, worker: Seat) -> list[Here]:
        return [here for here in worker.here.values() if here.runs or self._fast]

    def _after(self, name: str, here: Here) -> int:
        """Tokens that it holds at the end of this tick."""
        life = self.lives[name]
        return life.request.prompt_tokens + max(life.made, min(life.made + TOKENS, here.limit))

    def _drop(self, worker: Seat, name: str) -> RequestProgress:
        worker.here[name].held = 0
        return self._progress(worker, name)

    def _progress(self, worker: Seat, name: str) -> RequestProgress:
        return RequestProgress(name, self.lives[name].made, worker.here[name].held)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK)


def due_within(decision: Decision, now: float, limit_s: float) -> bool:
    """Whether time alone calls for a round by then."""
    return min(decision.next_s, inf) <= now + limit_s
