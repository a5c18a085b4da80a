"""ALISE's order and its preemptions as transcripts and hand-worked tables."""

from math import inf
from typing import Any

import pytest

from services.core import (
    Completion,
    CostModel,
    FinishReason,
    Grant,
    KVCosts,
    Pause,
    Plan,
    Progress,
    Report,
    Request,
    Residency,
    Standing,
    WorkerView,
)
from services.forecast import Forecast, certain
from services.scheduler import events as ev
from services.scheduler.alise import FRONT
from services.scheduler.presets import choose
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


# The order


@pytest.mark.parametrize(
    ("tokens", "level"),
    [(1, 0), (50, 0), (51, 1), (100, 1), (101, 2), (200, 2), (201, 3), (400, 3), (999, 3)],
)
def test_levels_end_at_the_base_and_its_doublings(tokens: int, level: int) -> None:
    d = Driver(levels=4)
    d.submit("a", tokens)
    assert d.levels() == {"a": level}


def test_prefill_of_what_is_not_held_counts() -> None:
    d = Driver()
    d.step(ev.Costed("w0", CostModel(0.0, 0.002, 0.01, 0.0)), 0.0)
    d.submit("a", 30, prompt=100)
    assert d.state.jobs["a"].rank.remaining_s == about(0.3 + 0.2)
    d.report(1.0, progress=(Progress("a", 10, 60),))  # 110 tokens, 60 of them with KV
    assert d.state.jobs["a"].rank.remaining_s == about(0.2 + 0.1)


def test_a_step_is_shared_by_those_who_run() -> None:
    """A step of 40 ms and 1 ms a sequence: four that run together take 11 ms each a token. How
    many do is followed by doublings, so that ranks hold still."""
    d = Driver(places=20, memory=1_000)
    d.step(ev.Costed("w0", CostModel(0.04, 0.0, 0.001, 0.0)), 0.0)
    pace_s = {}
    for count in range(1, 9):
        name = f"r{count}"
        d.submit(name, 100)
        pace_s[count] = d.state.jobs[name].rank.remaining_s / 100
    one, three, seven = (0.04 / seqs + 0.001 for seqs in (1, 3, 7))
    assert pace_s == about(
        {1: one, 2: one, 3: three, 4: three, 5: three, 6: three, 7: seven, 8: seven}
    )


def test_the_shortest_goes_first_and_what_is_served_comes_to_need_less() -> None:
    d = Driver(places=1, preemption="never")
    for name, tokens in {"a": 400, "b": 120, "c": 30, "d": 110, "e": 90}.items():
        d.submit(name, tokens)
    assert (d.running, d.queued) == (["a"], ["c", "e", "d", "b"])
    assert d.levels() == {"a": 3, "b": 2, "c": 0, "d": 2, "e": 1}
    d.progress("a", 320, 1.0)
    assert d.levels()["a"] == 1


def test_ageing() -> None:
    """Up one every 10 s from where the remaining time puts it, then to the front."""
    d = Driver(places=1, preemption="never", ageing_s=10)
    d.submit("a", 40, 0.0)
    d.submit("b", 150, 0.0)
    d.submit("c", 120, 4.0)
    assert (d.queued, d.state.next_deadline()) == (["c", "b"], 10.0)
    d.step(ev.Tick(), 9.9)
    assert d.queued == ["c", "b"]
    d.step(ev.Tick(), 10.0)
    assert (d.queued, d.levels()) == (["b", "c"], {"a": 0, "b": 1, "c": 2})
    assert d.state.next_deadline() == 14.0
    d.step(ev.Tick(), 14.0)
    assert d.queued == ["c", "b"]  # both at level 1, where the shorter goes first
    for now in (20.0, 24.0, 30.0):
        d.step(ev.Tick(), now)
    assert (d.queued, d.levels()) == (["b", "c"], {"a": 0, "b": FRONT, "c": 0})
    d.step(ev.Tick(), 34.0)
    assert (d.queued, d.levels()["c"]) == (["b", "c"], FRONT)  # there, who came first
    assert d.state.next_deadline() == inf


def test_a_wait_that_ended_does_not_age() -> None:
    d = Driver(places=1, preemption="never")
    d.submit("a", 40)
    d.submit("b", 150)
    d.report(5.0, finished=(Completion("a", 40, FinishReason.STOP),))
    assert (d.running, d.state.next_deadline()) == (["b"], inf)


def test_who_outlives_its_promise_has_it_doubled_and_moves_down_one() -> None:
    d = Driver()
    d.submit("a", 60)
    assert d.levels() == {"a": 1}
    d.progress("a", 59, 1.0)
    assert d.levels() == {"a": 0}
    d.progress("a", 60, 2.0)  # it did not end there: 120 are promised, 60 left, and one further
    rank = d.state.jobs["a"].rank
    assert (rank.promised_tokens, rank.remaining_s, rank.level) == (120, about(0.6), 2)
    d.progress("a", 100, 3.0)
    assert d.levels() == {"a": 1}
    d.progress("a", 250, 4.0)  # twice at once: 480 are promised, 230 left, and three further
    rank = d.state.jobs["a"].rank
    assert (rank.promised_tokens, rank.level) == (480, 3 + 3)


def test_a_promise_never_passes_max_tokens() -> None:
    d = Driver()
    d.submit("a", 600)
    d.progress("a", 700, 1.0)
    assert d.state.jobs["a"].rank.promised_tokens == 1_000
    level = d.levels()["a"]
    d.progress("a", 999, 2.0)
    assert d.levels()["a"] < level


def test_a_distribution_promises_its_mean_given_what_is_there() -> None:
    d = Driver()
    d.step(ev.Submitted(G, Request("a", "demo", 10, 1_000, 0.0, delivered_tokens=30)), 0.0)
    forecast = Forecast((20.0, 40.0, 80.0), (0.5, 0.25, 0.25), 1_000)
    d.step(ev.Forecasted((("a", forecast),)), 0.0)
    assert d.state.jobs["a"].rank.promised_tokens == 60


# Preemption


def test_preempt_on_arrival() -> None:
    """`long` fills memory; `short` comes, and takes its place until it has ended."""
    d = Driver(memory=300)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.plans.clear()
    d.submit("short", 20, 2.0, prompt=100)
    [plan] = d.plans
    assert plan == Plan(
        seq=3,
        admit=(Grant("short", 32),),
        pause=(Pause("long", Residency.KEEP),),
        victims=("short",),
        order=(Standing("short", 0.0), Standing("long", about(0.2))),
        residency="swap",
        costs=KVCosts(0.0, 0.001, 0.002),
    )
    [asked] = d.asked[-1:]
    [group] = asked.groups
    assert group.running.prompt_tokens == ()  # `long` stands in line, behind whom it makes way for
    assert group.queued.output_tokens == (0, 150)
    assert (d.running, d.queued) == (["short"], ["long"])
    job = d.state.jobs["long"]
    assert (job.home, job.held_tokens, job.preemptions) == ("w0", 250, 1)

    d.told.clear()
    d.report(2.1, applied=2)
    assert d.told == []  # the worker has not carried it out yet
    d.report(2.2, applied=3)
    assert d.told == [ev.Preempt(G, "long", 150)]
    d.report(3.0, finished=(Completion("short", 20, FinishReason.STOP),))
    assert d.running == ["long"]
    assert d.plans[-1].admit == (Grant("long", 182),)
    assert not any(isinstance(told, ev.Place) and told.request_id == "long" for told in d.told)


def test_nobody_is_paused_where_there_is_room() -> None:
    d = Driver(memory=1_000)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.submit("short", 20, 2.0, prompt=100)
    assert d.running == ["long", "short"]


def test_nobody_is_paused_for_one_who_does_not_fit_even_so() -> None:
    d = Driver(memory=1_000)
    d.submit("stays", 30, prompt=500)  # level 0, like the one that comes
    d.progress("stays", 1, 1.0, prompt=500)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.submit("short", 20, 2.0, prompt=600)
    assert (d.running, d.queued) == (["stays", "long"], ["short"])


def test_only_as_many_are_paused_as_must_be_the_least_urgent_first() -> None:
    d = Driver(memory=640)
    for at, name in enumerate("abc"):
        d.submit(name, 400 + 100 * at, prompt=200)
        d.progress(name, 1, 1.0, prompt=200)
    d.submit("x", 20, 2.0, prompt=150)
    assert d.plans[-1].pause == (Pause("c", Residency.KEEP),)
    assert (d.running, d.queued) == (["a", "b", "x"], ["c"])


def test_who_does_not_fit_pauses_nobody_but_one_before_it_may() -> None:
    """`y` does not fit even in the place of both: it waits; `x` takes the place of one of them.
    The batcher is asked twice: the second time about `x` alone."""
    d = Driver(memory=640, preemption="never")
    for at, name in enumerate("ab"):
        d.submit(name, 400 + 100 * at, prompt=300)
        d.progress(name, 1, 1.0, prompt=300)
    d.submit("y", 30, prompt=600)
    d.state.preset = d.state.ledger.preset = choose("alise", {"base_s": 0.5})
    d.submit("x", 20, prompt=100)
    first, again = d.asked[-2:]
    assert [g.queued.prompt_tokens for g in first.groups] == [(100, 600, 300, 300)]
    assert [g.queued.prompt_tokens for g in again.groups] == [(100, 300, 300)]
    assert (d.running, d.queued) == (["a", "x"], ["y", "b"])


def test_who_has_only_just_come_is_not_paused() -> None:
    """Its prompt may not even be there, and nothing would be gained by keeping its KV."""
    d = Driver(places=1)
    d.submit("long", 400)
    d.submit("short", 20, 1.0)
    assert d.running == ["long"]
    d.report(2.0, progress=(Progress("long", 0, 10),))
    assert d.running == ["short"]


@pytest.mark.parametrize(
    ("running", "queued", "swapped"),
    [
        (400, 20, True),
        (110, 95, False),  # a level better, but not shorter by a quarter
        (125, 95, True),
        (200, 110, False),  # shorter by far, but of the same level
        (20, 400, False),
    ],
)
def test_hysteresis(running: int, queued: int, swapped: bool) -> None:
    d = Driver(places=1)
    d.submit("a", running)
    d.report(1.0, progress=(Progress("a", 0, 10),))
    d.submit("b", queued, 1.0)
    assert d.running == (["b"] if swapped else ["a"])


def test_two_of_near_equal_need_swap_once_at_most() -> None:
    """Whatever happens as they take turns at one place: only ageing to the front lets the second
    in, and from there it is not sent away."""
    d = Driver(places=1, ageing_s=1)
    made = {"a": 0, "b": 0}
    d.submit("a", 500)
    d.submit("b", 498)
    for at in range(1, 998):
        [name] = d.running
        made[name] += 1
        now = at * 0.01
        if made[name] == {"a": 500, "b": 498}[name]:
            d.report(now, finished=(Completion(name, made[name], FinishReason.STOP),))
        elif made[name] % 16 == 1:
            d.progress(name, made[name], now)
        else:
            d.step(ev.Tick(), now)
    paused = [pause.request_id for plan in d.plans for pause in plan.pause]
    assert len(paused) <= 1
    assert made == {"a": 500, "b": 497}


def test_defer_makes_room_among_places_but_not_in_memory() -> None:
    d = Driver("alise-defer", memory=300, places=2)
    d.submit("long", 400, prompt=100)
    d.progress("long", 150, 1.0, prompt=100)
    d.submit("short", 20, 2.0, prompt=100)
    assert (d.running, d.queued) == (["long"], ["short"])  # there is a place, but no memory
    d.submit("tiny", 10, 3.0, prompt=40)
    assert (d.running, d.queued) == (["long", "tiny"], ["short"])
    d.progress("tiny", 1, 3.0, prompt=40)
    d.submit("tinier", 5, 4.0, prompt=5)  # memory for it, but no place: the long one's
    assert (d.running, d.queued) == (["tiny", "tinier"], ["short", "long"])
    [group] = d.asked[-1].groups
    assert sorted(group.running.prompt_tokens) == [40, 100]  # the paused keeps its memory
    d.report(5.0, finished=(Completion("tiny", 10, FinishReason.STOP),))
    assert (d.running, d.queued) == (["tinier", "long"], ["short"])


# What the plan says: EWT


def test_expected_waits_by_hand() -> None:
    """Three run; two are paused, and one that waits has no KV yet. In the order of what they
    still take: x 0.1, y 0.3 | fresh 0.5 | p 0.6 | q 3 s; all before each add up, and ageing
    takes (level + 2) · 1 s at most."""
    d = Driver("alise", memory=10_000, places=5, ageing_s=1.0, preemption="never")
    for name, tokens in {"x": 10, "y": 30, "z": 500, "p": 60, "q": 300}.items():
        d.submit(name, tokens, 0.0)
        d.progress(name, 0, 0.0)
    evicted = (Progress("p", 0, 10), Progress("q", 0, 10))
    d.state.workers["w0"].view = WorkerView("w0", "", "demo", 10_000, 16, 3, 5_000)
    d.report(0.0, evicted=evicted)
    d.submit("fresh", 50, 0.0)
    d.plans.clear()
    d.report(0.25, progress=(Progress("z", 20, 30),))  # 480 left; its slice goes on
    assert d.queued == ["fresh", "p", "q"]
    [plan] = d.plans
    assert plan.extend == (Grant("z", 52),)
    assert plan.order == (
        Standing("x", 0.0),
        Standing("y", 0.0),
        Standing("z", 0.0),
        Standing("p", about(0.1 + 0.3 + 0.5)),
        Standing("q", about(0.1 + 0.3 + 0.5 + 0.6)),
    )
    assert plan.victims == ("z", "y", "x")
    d.plans.clear()
    d.report(0.95, progress=(Progress("z", 40, 50),))
    [plan] = d.plans
    assert plan.order[-2:] == (
        Standing("p", about(0.9)),
        Standing("q", about(1.5)),
    )
    for name in "xy":  # who doubles what it was to make is after all these
        d.progress(name, 300, 1.0)
    d.plans.clear()
    d.report(2.9, progress=(Progress("z", 60, 70),))
    assert d.levels()["p"] == d.levels()["fresh"] == FRONT
    assert d.plans[-1].order[-1] == Standing("q", about(0.9 + 0.6 - 0.4))


# Homes


def test_who_rests_at_a_worker_goes_home_to_it_only() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 100, 1.0, prompt=100)
    d.submit("b", 420, prompt=90)
    d.report(2.0, evicted=(Progress("b", 8, 98),), progress=(Progress("a", 150, 250),))
    assert ev.Preempt(G, "b", 8) in d.told
    d.attach("w1")
    d.report(3.0, on="w1")
    assert (d.running, d.queued) == (["a"], ["b"])  # w1 is free, but b's KV is at w0
    d.report(4.0, finished=(Completion("a", 200, FinishReason.STOP),))
    assert list(d.state.workers["w0"].running) == ["b"]
    assert d.plans[-1].admit == (Grant("b", 40),)


def test_who_lost_its_kv_is_free_to_go_elsewhere() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)
    assert d.queued == ["a"]
    d.attach("w1")
    d.told.clear()
    d.report(3.0, applied=2, evicted=(Progress("a", 152, 0),))
    assert list(d.state.workers["w1"].running) == ["a"]
    assert d.told == [
        ev.Preempt(G, "a", 152),
        ev.Place(G, "a", "w1", "unix:/w1", about(1.0)),
    ]
    assert d.plans[-2].cancel == ("a",)


def test_news_of_one_that_was_paused_meanwhile() -> None:
    """Reports cross plans: it ends, gets on, or is evicted before it reads that it is paused."""
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)
    d.report(2.1, applied=2, progress=(Progress("a", 153, 253),))
    assert d.state.jobs["a"].output_tokens == 153
    d.report(2.2, applied=2, finished=(Completion("a", 154, FinishReason.STOP),))
    assert d.queued == [] and "a" not in d.state.jobs
    [finish] = [told for told in d.told if isinstance(told, ev.Finish)]
    assert (finish.request_id, finish.preemptions, finish.queued_s) == ("a", 1, about(0.2))


def test_an_eviction_before_a_pause_that_is_over_is_history() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)  # plan 3 pauses a
    d.step(ev.Cancelled(G, "b", FinishReason.CANCELLED, 0), 2.0)  # plan 4 lets it run again
    assert d.running == ["a"]
    d.told.clear()
    d.report(2.1, applied=2, evicted=(Progress("a", 151, 0),))
    assert d.running == ["a"] and d.told == []
    d.report(2.2, applied=d.plans[-1].seq, evicted=(Progress("a", 151, 0),))
    assert d.state.jobs["a"].preemptions == 2 and ev.Preempt(G, "a", 151) in d.told


def test_a_lost_worker_takes_the_kv_that_rested_there() -> None:
    d = Driver(memory=300)
    d.submit("a", 400, prompt=100)
    d.progress("a", 150, 1.0, prompt=100)
    d.submit("b", 20, 2.0, prompt=100)
    d.told.clear()
    d.step(ev.WorkerLost("w0#1", "w0"), 3.0)
    assert d.told == [ev.Preempt(G, "b", 0), ev.Preempt(G, "a", 150)]
    assert all(job.home == "" and not job.resting for job in d.state.jobs.values())
    d.attach("w1", memory=1_000)
    assert sorted(d.running) == ["a", "b"]


def test_the_oracle_preset_is_alise_with_lengths_that_are_true() -> None:
    oracle, alise = choose("alise-oracle"), choose("alise")
    assert oracle.predictor == "oracle"
    assert oracle.ordered() == alise.ordered()
    d = Driver("alise-oracle", places=1)
    for name, tokens in {"a": 70, "b": 40, "c": 10}.items():
        d.step(ev.Submitted(G, Request(name, "demo", 10, 1_000, 0.0)), 0.0)
        d.step(ev.Forecasted(((name, certain(tokens, "oracle")),)), 0.0)
    ended = []
    while d.running:
        [name] = d.running
        ended.append(name)
        tokens = {"a": 70, "b": 40, "c": 10}[name]
        d.progress(name, tokens - 1, 1.0)
        assert d.levels()[name] == 0  # nobody is ever taken to be longer than it is
        d.report(1.0, finished=(Completion(name, tokens, FinishReason.LENGTH),))
    assert ended == ["a", "c", "b"]
