"""Tokens a second and goodput, from what a gateway has counted. Pure."""

from collections import deque
from dataclasses import astuple, dataclass

from protos.generated import scheduler_pb2

EVERY_S = 10.0
WINDOW_S = 60.0  # of goodput

PROMPT = "foretoken_prompt_tokens_total"
GENERATION = "foretoken_generation_tokens_total"
SLA = "foretoken_sla_requests_total"


@dataclass(frozen=True, slots=True)
class Totals:
    """So far, by a gateway's metrics: tokens taken in and given out, and requests by their SLAs."""

    prompt_tokens: float = 0.0
    generation_tokens: float = 0.0
    met: float = 0.0
    missed: float = 0.0


def totals_of(text: str) -> Totals:
    """As the exposition says them. O(lines)."""
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


class Throughput:
    """What came between two looks; of SLAs, within the last minute."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, Totals]] = deque()

    def look(self, now_s: float, totals: Totals, fleet: scheduler_pb2.FleetView) -> str:
        """A line on the time since the last look; empty at the first, and where nothing went on."""
        looks = self._looks
        if looks and any(
            a < b for a, b in zip(astuple(totals), astuple(looks[-1][1]), strict=True)
        ):
            looks.clear()  # another process counts, from 0
        before = looks[-1] if looks else None
        looks.append((now_s, totals))
        while looks[0][0] < now_s - WINDOW_S:
            looks.popleft()
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
            f"{running} running, {fleet.queued} waiting, KV {kv_share(fleet):.0%}"
            f"{self._goodput(totals)}"
        )

    def _goodput(self, totals: Totals) -> str:
        first = self._looks[0][1]
        met, missed = totals.met - first.met, totals.missed - first.missed
        if not met + missed:
            return ""
        return f", goodput {met / (met + missed):.0%} of {met + missed:.0f} in the last minute"


def kv_share(fleet: scheduler_pb2.FleetView) -> float:
    """Of the workers' KV tokens, those in use."""
    capacity = sum(worker.kv_tokens for worker in fleet.workers) or 1
    return sum(worker.held_tokens for worker in fleet.workers) / capacity
