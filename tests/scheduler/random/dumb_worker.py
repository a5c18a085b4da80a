"""A simulated worker that applies plans exactly."""

from dataclasses import dataclass, field

from services.core import HeldRequest, Residency
from services.scheduler.core import events as ev


@dataclass
class DumbWorker:
    """A worker that applies its plans exactly: its running requests, and its paused or evicted
    ones."""

    link: str = ""  # empty while it is detached
    size: int = 96
    running: set[str] = field(default_factory=set)
    paused: set[str] = field(default_factory=set)
    applied: int = 0
    reports: int = 0
    draining: bool = False

    def apply(self, action: ev.SendPlan, most: dict[str, int]) -> None:
        plan = action.plan
        assert action.link == self.link
        assert plan.seq == self.applied + 1
        self.applied = plan.seq
        self.running -= set(plan.cancel)
        self.paused -= set(plan.cancel)
        for pause in plan.pause:
            assert pause.residency is Residency.KEEP or self.draining
            self.running.remove(pause.request_id)
            self.paused.add(pause.request_id)
        assert not (plan.admit and self.draining)
        for grant in plan.admit:
            assert grant.request_id not in self.running
            self.running.add(grant.request_id)
            self.paused.discard(grant.request_id)
        for grant in (*plan.admit, *plan.extend):
            assert grant.request_id in self.running
            assert 0 < grant.limit_tokens <= most[grant.request_id]
        assert len(set(plan.victims)) == len(plan.victims)
        assert set(plan.victims) <= self.running
        assert len(self.running) <= 4

    def held(self, most: dict[str, int]) -> tuple[HeldRequest, ...]:
        """The requests of its hello."""
        has = [(name, True) for name in sorted(self.running)]
        has += [(name, False) for name in sorted(self.paused)]
        return tuple(HeldRequest(n, 10, most[n], 2, 10, most[n], runs, 1) for n, runs in has)
