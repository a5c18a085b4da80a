"""The scheduler's core as vLLM's scheduler drives it: requests and progress in, plans out."""

from prometheus_client import CollectorRegistry

from foretoken.vllm.planner import Planner
from services.core import (
    Completion,
    FinishReason,
    Plan,
    Request,
    RequestProgress,
    WorkerView,
)
from services.forecast import certain
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.observe.metrics import SchedulerMetrics

VIEW = WorkerView("vllm", "", "demo", kv_tokens=320, block_tokens=16, max_running=4,
                  max_context_tokens=320)  # fmt: skip


def planner(policy: str = "srtf") -> Planner:
    """Admits while prompt + max_tokens of all fit."""
    preset = choose(policy, {"form": "conservative", "residency": "drop"})
    return Planner(preset, VIEW, {}, now=0.0)


def request(name: str, most: int = 64, at_s: float = 0.0) -> Request:
    return Request(name, "demo", 16, most, at_s)


def plan(
    planner: Planner,
    now: float,
    progress: dict[str, tuple[int, int]] | None = None,
    finished: tuple[tuple[str, int], ...] = (),
    cut_short: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> Plan:
    """A round; `progress` has output and held tokens."""
    moved = [
        RequestProgress(name, output, held, -(-held // 16))
        for name, (output, held) in (progress or {}).items()
    ]
    used = sum(each.blocks for each in moved)
    return planner.plan(
        moved,
        [Completion(name, output, FinishReason.STOP) for name, output in finished],
        [Completion(name, 1, FinishReason.CANCELLED) for name in cut_short],
        [RequestProgress(name, 1, 0, 0) for name in preempted],
        20 - used,
        0,
        now,
    )


def admitted(plan: Plan) -> list[str]:
    return [grant.request_id for grant in plan.admit]


def paused(plan: Plan) -> list[str]:
    return [each.request_id for each in plan.pause]


def test_the_shortest_remaining_answer_preempts_the_longest() -> None:
    """Memory holds 320 tokens: the long request runs alone, and leaves when three short ones come
    that do not fit beside it."""
    core = planner()
    assert core.submit(request("long", 288), 0.0)
    core.learned([ev.Forecasted((("long", certain(288)),))], 0.0)
    assert admitted(plan(core, 0.0)) == ["long"]
    for name in ("a", "b", "c"):
        assert core.submit(request(name, 80), 1.0)
        core.learned([ev.Forecasted(((name, certain(80)),))], 1.0)
    second = plan(core, 1.0, {"long": (4, 20)})
    assert admitted(second) == ["a", "b", "c"]
    assert paused(second) == ["long"]
    # vLLM has freed its blocks: it starts again once the others have ended.
    third = plan(core, 2.0, {"long": (4, 0), "a": (32, 48), "b": (32, 48), "c": (32, 48)})
    assert admitted(third) == []
    fourth = plan(core, 3.0, finished=(("a", 80), ("b", 80), ("c", 80)))
    assert admitted(fourth) == ["long"]
    assert [outcome.output_tokens for outcome in core.pop_outcomes()] == [80, 80, 80]


def test_a_request_that_vllm_preempted_waits_for_the_next_plan() -> None:
    core = planner("fcfs")
    for name in ("a", "b"):
        core.submit(request(name, at_s=float(name == "b")), 1.0)
    assert admitted(plan(core, 1.0)) == ["a", "b"]
    assert core.state.ledger.running == 2
    again = plan(core, 2.0, {"a": (4, 20)}, preempted=("b",))
    assert admitted(again) == ["b"]


def test_requests_that_are_cut_short_leave_and_teach_nothing() -> None:
    core = planner()
    for name in ("runs", "waits"):
        core.submit(request(name, 288), 0.0)
    assert admitted(plan(core, 0.0)) == ["runs"]
    plan(core, 1.0, cut_short=("runs", "waits"))
    assert "runs" not in core
    assert "waits" not in core
    assert core.pop_outcomes() == []
    assert (core.state.ledger.running, core.waiting) == (0, 0)


def test_a_request_that_memory_cannot_hold_is_not_planned() -> None:
    core = planner()
    assert not core.submit(request("huge", 4_096), 0.0)
    assert "huge" not in core


def test_a_request_starts_at_once_while_none_waits_and_memory_has_room() -> None:
    core = planner()
    core.submit(request("a", 200), 0.0)
    assert core.admit_at_once(["a"], 0.0) == ["a"]
    assert core.state.ledger.running == 1
    core.submit(request("b", 200), 0.0)  # 32 + 400 tokens at their ends, of 320
    assert core.admit_at_once(["b"], 0.0) == []
    core.learned([ev.Forecasted((("a", certain(20)),))], 0.0)
    assert core.admit_at_once(["b"], 0.0) == ["b"]  # is expected to be as long as the running one
    core.submit(request("c", 8), 0.0)
    core.submit(request("d", 8), 0.0)
    assert core.admit_at_once(["d"], 0.0) == []  # another one waits
    assert admitted(plan(core, 1.0, {"a": (4, 20), "b": (4, 20)})) == ["c", "d"]


def test_no_more_start_at_once_than_may_run() -> None:
    core = planner()
    for name in "abcde":
        core.submit(request(name, 1), 0.0)
    assert core.admit_at_once(list("abcde"), 0.0) == []


def test_nothing_is_due_without_news() -> None:
    core = planner()
    core.submit(request("a"), 0.0)
    plan(core, 0.0)
    assert not core.is_due(1e9, news=False)
    assert core.is_due(1e9, news=True)


def test_metrics_count_what_plans_and_vllm_do() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    preset = choose("srtf", {"form": "conservative", "residency": "drop"})
    core = Planner(preset, VIEW, {}, 0.0, metrics.observe)
    metrics.watch(core.state)
    core.submit(request("long", 200), 0.0)
    assert core.admit_at_once(["long"], 0.0) == ["long"]
    core.learned([ev.Forecasted((("long", certain(200)),))], 0.0)
    core.submit(request("short", 200), 1.0)
    core.learned([ev.Forecasted((("short", certain(8)),))], 1.0)
    assert paused(plan(core, 1.0, {"long": (4, 20)})) == ["long"]
    plan(core, 2.0, {"long": (4, 0)}, preempted=("short",))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"foretoken_{name}", labels)

    assert value("scheduler_preset", preset="srtf") == 1
    assert value("num_preemptions_total", cause="paused") == 1
    assert value("num_preemptions_total", cause="evicted") == 1
    assert value("scheduler_requests_waiting_for", reason="memory") == 1
    assert value("scheduler_plan_age_seconds_sum") == 1.0
