"""Computes tokens per second and goodput from a gateway's metrics. Pure."""

from collections import deque
from dataclasses import astuple, dataclass

from protos.generated import scheduler_pb2

INTERVAL_S = 10.0
GOODPUT_WINDOW_S = 60.0

PROMPT = "foretoken_prompt_tokens_total"
GENERATION = "foretoken_generation_tokens_total"
SLA = "foretoken_sla_requests_total"


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters of a gateway: prompt and output tokens, requests that met or missed their SLA."""

    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    met: float = 0.0
    missed: float = 0.0


def parse_totals(text: str) -> Totals:
    """Parses the counters from Prometheus text. O(lines)."""
    prompt = generation = met = missed = 0.0
    for line in text.splitlines():
        series, _, number = line.rpartition(" ")
        name = series.partition("{")[0]
        if name == PROMPT:
            prompt += float(number)
        elif name == GENERATION:
            generation += float(number)
        elif name == SLA and 'outcome="met"' in series:
            met += float(number)
        elif name == SLA:
            missed += float(number)
    return Totals(prompt, generation, met, missed)


class ThroughputReport:
    """Rates since the previous update, and goodput over the last minute."""

    def __init__(self) -> None:
        self._updates: deque[tuple[float, Totals]] = deque()

    def update(self, now_s: float, totals: Totals, fleet: scheduler_pb2.FleetView) -> str:
        """Returns a line about the time since the last update; empty without one or load."""
        updates = self._updates
        if updates and any(
            a < b for a, b in zip(astuple(totals), astuple(updates[-1][1]), strict=True)
        ):
            updates.clear()  # the gateway restarted
        before = updates[-1] if updates else None
        updates.append((now_s, totals))
        while updates[0][0] < now_s - GOODPUT_WINDOW_S:
            updates.popleft()
        if before is None:
            return ""
        since_s, then = before
        took_s = max(1e-9, now_s - since_s)
        prompt = (totals.prompt_tokens - then.prompt_tokens) / took_s
        generation = (totals.generation_tokens - then.generation_tokens) / took_s
        running = sum(worker.running for worker in fleet.workers)
        if not (prompt or generation or running or fleet.queued):
            return ""
        return (
            f"prompt {prompt:.1f} tokens/s, generation {generation:.1f} tokens/s, "
            f"{running} running, {fleet.queued} waiting, KV {kv_usage(fleet):.0%}"
            f"{self._goodput(totals)}"
        )

    def _goodput(self, totals: Totals) -> str:
        first = self._updates[0][1]
        met, missed = totals.met - first.met, totals.missed - first.missed
        if not met + missed:
            return ""
        return f", goodput {met / (met + missed):.0%} of {met + missed:.0f} in the last minute"


def kv_usage(fleet: scheduler_pb2.FleetView) -> float:
    """Returns the share of the workers' KV tokens that is in use."""
    capacity = sum(worker.kv_tokens for worker in fleet.workers) or 1
    return sum(worker.held_tokens for worker in fleet.workers) / capacity
