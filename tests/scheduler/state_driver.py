"""Helpers to drive a scheduler's state: each returns the actions of a step."""

from math import inf
from typing import Any

from services.core import (
    Report,
    Request,
    WorkerView,
)
from services.forecast import certain
from services.policies.preset import choose
from services.scheduler.core import events as ev
from services.scheduler.core.admission import SchedulerLimits
from services.scheduler.core.phases import RequestPhase
from services.scheduler.core.state import SchedulerState
from tests.policies.explanations import explanation

G = "gateway#1"


def worker(name: str = "w0", kv_tokens: int = 1_000, link: str = "#1") -> ev.WorkerAttached:
    view = WorkerView(name, f"unix:/{name}", "demo", kv_tokens, 16, 8, 500)
    return ev.WorkerAttached(name + link, view)


def request(name: str, prompt: int = 10, most: int = 50, at: float = 0.0, deadline: float = inf):
    return Request(name, "demo", prompt, most, at, deadline_s=deadline)


def state(policy: str = "fcfs", apart: bool = False, **limits: Any) -> Any:
    """Untyped, so that tests can compare actions by their fields."""
    return SchedulerState(choose(policy), SchedulerLimits(**limits), apart)


def run_step(s: Any, event: ev.Event, now: float) -> Any:
    """A step and, if due, a round; returns the actions of both."""
    actions = s.step(event, now)
    return actions + s.step(ev.Round(), now) if s.round_due_s <= now else actions


def submitted(s: Any, asked: Request, now: float = 0.0) -> Any:
    """Submit and forecast at once; the actions of the second step and its round."""
    s.step(ev.Submitted(G, asked), now)
    return run_step(s, ev.Forecasted(((asked.request_id, certain(asked.max_tokens)),)), now)


def admitted(s: Any, asked: Request, now: float = 0.0, on: str = "w0") -> None:
    submitted(s, asked, now)
    assert asked.request_id in s.workers[on].running


def waits(s: Any, asked: Request, now: float = 0.0) -> None:
    submitted(s, asked, now)
    assert asked.request_id in queued(s)


def queued(s: Any) -> list[str]:
    """Queued requests in the order of their rows."""
    return [n for n, job in s.jobs.items() if s.ledger.phase(job) is RequestPhase.QUEUED]


def report(s: Any, seq: int, now: float, on: str = "w0", **what: Any) -> Any:
    """A report of a worker that has applied all its plans, unless applied_plan_seq is given."""
    what = {"applied_plan_seq": s.workers[on].plan_seq} | what
    return run_step(s, ev.Reported(f"{on}#1", on, Report(seq, **what)), now)


def why(s: Any, name: str) -> Any:
    """The wait explanation of a request from the last round."""
    return explanation(s.rounds.decision.explanations, s.jobs[name].row)
