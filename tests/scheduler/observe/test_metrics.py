"""The scheduler's metrics, as transcripts with hand-computed numbers."""

from math import inf
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from observability.metrics.metric import SLACK_S
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
from services.forecast import certain
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.state import SchedulerState
from services.scheduler.observe.metrics import SchedulerMetrics
from tests.scheduler.state_driver import (
    G,
    admitted,
    report,
    request,
    run_step,
    submitted,
    waits,
    worker,
)

# A prompt token takes 1 ms and an output token 10 ms, whatever the batch size.
COST = CostModel(base_s=0.0, prefill_token_s=0.001, decode_seq_s=0.01, context_token_s=0.0)


class Counting(SchedulerState):
    """A state with the metrics of its service."""

    def __init__(self, policy: str = "fcfs", **choices: Any):
        super().__init__(choose(policy, choices))
        self.registry = CollectorRegistry()
        self.metrics = SchedulerMetrics(self.registry)
        self.metrics.watch(self)

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        actions = super().step(event, now)
        self.metrics.observe(self.last_step, self)
        return actions

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"foretoken_{name}", labels)

    def by(self, name: str, label: str) -> dict[str, float]:
        """The values of a metric that are not 0, by label."""
        families = {family.name: family for family in self.registry.collect()}
        samples = families[f"foretoken_{name.removesuffix('_total')}"].samples
        values = {s.labels[label]: s.value for s in samples if not s.name.endswith("_created")}
        return {value: number for value, number in values.items() if number}


def attached(s: Any, name: str, places: int = 1, now: float = 0.0) -> Any:
    view = WorkerView(name, f"unix:/{name}", "demo", 2_000, 16, places, 900)
    s.step(ev.WorkerAttached(f"{name}#1", view), now)
    return run_step(s, ev.Costed(name, COST), now)


def submit(name: str, prompt: int, at: float, ttft_s: float = inf, sla: str = "chat") -> Request:
    return Request(name, "demo", prompt, 50, at, sla=Sla(sla, ttft_s=ttft_s))


def test_decisions_and_preemptions_are_counted_by_cause() -> None:
    """91 of 96 tokens may be planned: two requests of 30 fit, and one of 46 does not fit beside
    them."""
    s = Counting()
    run_step(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=30))
    admitted(s, request("b", prompt=30, at=1.0), 1.0)
    waits(s, request("c", prompt=46, at=2.0), 2.0)
    assert s.by("scheduler_decisions_total", "reason") == {"admitted": 2, "memory": 1}
    assert s.by("scheduler_requests_waiting_for", "reason") == {"memory": 1}
    assert s.value("scheduler_requests_running") == 2
    assert s.by("num_preemptions_total", "cause") == {}

    report(s, 1, 3.0, evicted=(RequestProgress("b", 20, 0),))  # it precedes `c` now
    assert s.by("scheduler_decisions_total", "reason") == {"admitted": 2, "memory": 2, "blocked": 1}
    assert s.by("scheduler_requests_waiting_for", "reason") == {"memory": 1, "blocked": 1}
    assert (s.value("scheduler_requests_waiting"), s.value("workers_attached")) == (2, 1)
    assert s.by("num_preemptions_total", "cause") == {"evicted": 1}

    report(s, 2, 4.0, finished=(Completion("a", 50, FinishReason.LENGTH),))
    assert s.by("scheduler_requests_waiting_for", "reason") == {"memory": 1}  # `b` resumes
    assert s.by("scheduler_admissions_total", "worker") == {"w0": 3}
    run_step(s, ev.WorkerLost("w0#1", "w0"), 5.0)
    assert s.by("num_preemptions_total", "cause") == {"evicted": 1, "lost": 1}
    assert (s.value("workers_attached"), s.value("workers_lost_total")) == (0, 1)
    assert s.value("scheduler_admissions_total", worker="w0") is None
    assert s.value("predicted_peak_tokens", worker="w0") is None


def test_displaced_worker_counts_as_one_loss() -> None:
    s = Counting()
    run_step(s, worker(link="#1"), 0.0)
    run_step(s, worker(link="#2"), 1.0)
    run_step(s, ev.WorkerLost("w0#1", "w0"), 2.0)
    assert (s.value("workers_attached"), s.value("workers_lost_total")) == (1, 1)


def test_refusals_are_counted_by_reason() -> None:
    s = Counting()
    run_step(s, worker(), 0.0)
    run_step(s, ev.Submitted(G, request("long", most=5_000)), 0.0)
    admitted(s, request("a"))
    run_step(s, ev.Submitted(G, request("a")), 0.0)
    assert s.by("scheduler_requests_refused_total", "reason") == {"too_long": 1, "duplicate": 1}
    assert s.value("scheduler_requests_refused_total", reason="queue_full") == 0


def test_pauses_moves_and_plan_age_are_measured() -> None:
    """`a` may finish its answer at 0.5, is paused for `b` at 1.0, has stopped at 1.5, and starts at
    a new worker."""
    s = Counting("alise", place="max_min", move_gain=1.0)
    attached(s, "w0")
    submitted(s, Request("a", "demo", 100, 700, 0.0), 0.0)
    run_step(
        s, ev.Reported("w0#1", "w0", Report(1, 1, progress=(RequestProgress("a", 5, 104, 7),))), 0.5
    )
    submitted(s, Request("b", "demo", 10, 30, 1.0), 1.0)
    here = (RequestProgress("a", 6, 105, 7), RequestProgress("b", 1, 10, 1))
    run_step(s, ev.Reported("w0#1", "w0", Report(2, 2, progress=here, free_blocks=117)), 1.2)
    assert s.value("scheduler_plan_age_seconds_count") == 2
    run_step(s, ev.Reported("w0#1", "w0", Report(3, 3, progress=here, free_blocks=117)), 1.5)
    assert s.value("scheduler_moves_total") == 0
    attached(s, "w1", now=1.5)
    assert s.by("num_preemptions_total", "cause") == {"paused": 1}
    assert s.value("scheduler_moves_total") == 1
    assert s.by("scheduler_admissions_total", "worker") == {"w0": 2, "w1": 1}
    assert s.value("scheduler_plan_age_seconds_count") == 3
    assert s.value("scheduler_plan_age_seconds_sum") == pytest.approx(0.5 + 0.7 + 0.5)

    run_step(s, ev.WorkerLost("w0#1", "w0"), 2.0)
    run_step(s, ev.Reported("w0#1", "w0", Report(4, 9)), 3.0)  # from a stream that has ended
    assert s.value("scheduler_plan_age_seconds_count") == 3


def test_idle_memory_and_slots_count_while_a_request_waits() -> None:
    """`a` holds 3 of 6 blocks, and 1 of 8 slots; `b` does not fit beside it. Rounds are 1 s and
    then 0.5 s apart: 0.1 · 1, then 0.9 · 0.1 + 0.1 · 0.5."""
    s = Counting()
    run_step(s, worker(kv_tokens=96), 0.0)
    admitted(s, request("a", prompt=46))
    report(s, 1, 0.0, free_blocks=3)
    kv, slots, of = "scheduler_kv_idle_ratio", "scheduler_slots_idle_ratio", {"worker": "w0"}
    assert (s.value(kv, **of), s.value(slots, **of)) == (0, 0)
    waits(s, request("b", prompt=46))
    assert (s.value(kv, **of), s.value(slots, **of)) == (3 / 6, 7 / 8)
    assert s.value("scheduler_plan_interval_seconds") == 0
    report(s, 2, 1.0, progress=(RequestProgress("a", 2, 48),), free_blocks=3)
    report(s, 3, 1.5, progress=(RequestProgress("a", 3, 49),), free_blocks=2)
    assert s.value("scheduler_plan_interval_seconds") == pytest.approx(0.14)
    assert s.value(kv, **of) == 2 / 6


def within(s: Any, sla: str) -> tuple[float, float]:
    """The bucket of the only observed slack of that class."""
    name, of = "slack_at_admission_seconds", {"class": sla}
    assert s.value(f"{name}_count", **of) == 1
    samples = [each for family in s.registry.collect() for each in family.samples]
    cells = [x for x in samples if x.name == f"foretoken_{name}_bucket"]
    at = [cell.value for cell in cells if cell.labels["class"] == sla].index(1)
    return SLACK_S[at - 1], SLACK_S[at]


def test_slack_at_first_placement_and_infeasible_requests() -> None:
    """One slot. `a` gets it 0.25 s after arrival. `b` needs 0.1 s of prefill and has 0.05 s. `c`
    waits for `b`, 0.1 + 0.5 s, needs 0.01 s of prefill, and has 1 s; `d` waits for both, 0.6 + 0.51
    s."""
    s = Counting()
    attached(s, "w0")
    submitted(s, submit("a", 100, 0.0, ttft_s=1.0), 0.25)
    submitted(s, submit("b", 100, 0.5, ttft_s=0.05, sla="hasty"), 0.5)
    submitted(s, submit("c", 10, 0.51, ttft_s=1.0), 0.51)
    assert s.by("predicted_infeasible_total", "class") == {"hasty": 1}
    submitted(s, submit("d", 10, 0.52, ttft_s=1.0), 0.52)
    submitted(s, submit("patient", 10, 0.53, sla="batch"), 0.53)
    assert s.by("predicted_infeasible_total", "class") == {"hasty": 1, "chat": 1}
    assert within(s, "chat") == (0.5, 1.0)  # 0.75 s

    report(s, 1, 2.0, finished=(Completion("a", 50, FinishReason.LENGTH),))  # `b` is next
    assert within(s, "hasty") == (-2.0, -1.0)  # 0.5 + 0.05 - 2 s
    run_step(s, ev.WorkerLost("w0#1", "w0"), 3.0)
    attached(s, "w1", now=4.0)  # it is first, and gets the slot again
    assert s.by("scheduler_admissions_total", "worker") == {"w1": 1}
    assert s.value("slack_at_admission_seconds_count", **{"class": "hasty"}) == 1
    assert s.by("predicted_infeasible_total", "class") == {"hasty": 1, "chat": 1}


def test_request_admitted_at_once_is_not_infeasible() -> None:
    """Two requests arrive together: `f` takes 0.5 + 0.5 s, longer than the 0.9 s budget of `g`."""
    s = Counting()
    attached(s, "w0", places=2)
    for each in (submit("f", 500, 0.0), submit("g", 10, 0.0, ttft_s=0.9)):
        s.step(ev.Submitted(G, each), 0.0)
    run_step(s, ev.Forecasted((("f", certain(50)), ("g", certain(50)))), 0.0)
    assert len(s.workers["w0"].running) == 2
    assert s.by("predicted_infeasible_total", "class") == {}


def test_no_prediction_without_workers() -> None:
    """The prediction is made once a worker attaches: 0.1 s of prefill, and 0.05 s left."""
    s = Counting()
    submitted(s, submit("a", 100, 0.0, ttft_s=1.0))
    assert s.by("predicted_infeasible_total", "class") == {}
    view = WorkerView("w0", "unix:/w0", "demo", 2_000, 16, 1, 900)
    s.step(ev.WorkerAttached("w0#1", view), 0.95)
    run_step(s, ev.Costed("w0", COST), 0.95)
    assert s.by("predicted_infeasible_total", "class") == {"chat": 1}


def test_unknown_sla_classes_do_not_grow_labels() -> None:
    s = Counting()
    attached(s, "w0")
    for number in range(40):
        submitted(s, submit(f"r{number}", 10, 0.0, ttft_s=0.0, sla=f"class {number}"))
    submitted(s, submit("long", 10, 0.0, ttft_s=0.0, sla="x" * 10_000))
    counts = s.by("predicted_infeasible_total", "class")
    assert len(counts) == 33 and counts["other"] == 9 and counts["class 0"] == 1


def test_peak_is_from_last_round() -> None:
    """10 + 50 tokens of each request, four blocks; 0 without requests."""
    s = Counting("conservative")
    run_step(s, worker(), 0.0)
    admitted(s, request("a"))
    assert s.value("predicted_peak_tokens", worker="w0") == 64
    admitted(s, request("b"))
    assert s.value("predicted_peak_tokens", worker="w0") == 128
    ended = tuple(Completion(name, 50, FinishReason.LENGTH) for name in "ab")
    report(s, 1, 1.0, finished=ended)
    assert s.value("predicted_peak_tokens", worker="w0") == 0
