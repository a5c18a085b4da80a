"""Computes the figures of a load from its samples: latency, throughput, goodput, errors. Pure."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import fmean
from types import MappingProxyType

from foretoken.bench.samples import STOPPED, Sample

SHARES = (0.5, 0.9, 0.99)
ID = re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[a-zA-Z-])[\w-]{6,}\b")  # ids in error messages


@dataclass(frozen=True)
class Budgets:
    """Latency budgets of an SLA class, in seconds; an infinite budget is not checked."""

    ttft_s: float = inf
    tpot_s: float = inf
    mtpot_s: float = inf

    def met_by(self, sample: Sample) -> bool:
        """Whether the answer is complete and within all budgets."""
        return (
            sample.complete
            and sample.ttft_s <= self.ttft_s
            and (sample.tpot_s or 0.0) <= self.tpot_s
            and sample.longest_gap_s <= self.mtpot_s
        )


@dataclass(frozen=True)
class Spread:
    """Distribution of one latency over a load; NaN if there is no value."""

    mean: float
    p50: float
    p90: float
    p99: float
    maximum: float
    count: int

    @classmethod
    def from_values(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        if not ordered:
            return cls(nan, nan, nan, nan, nan, 0)
        p50, p90, p99 = (quantile(ordered, share) for share in SHARES)
        return cls(fmean(ordered), p50, p90, p99, ordered[-1], len(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Returns the quantile of sorted values by linear interpolation, as numpy does."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Goodput:
    """Requests of one SLA class that met its budgets."""

    met: int
    total: int
    per_s: float

    @property
    def share(self) -> float:
        return self.met / self.total if self.total else nan


LATENCIES: Mapping[str, Callable[[Sequence[Sample]], Iterable[float]]] = MappingProxyType(
    {
        "ttft_s": lambda complete: (s.ttft_s for s in complete),
        "tpot_s": lambda complete: (s.tpot_s for s in complete if s.tpot_s is not None),
        "itl_s": lambda complete: (gap for s in complete for gap in s.gaps_s),
        "longest_gap_s": lambda complete: (s.longest_gap_s for s in complete if len(s.text_s) > 1),
        "e2e_s": lambda complete: (s.e2e_s for s in complete),
    }
)


@dataclass(frozen=True)
class Figures:
    """The figures of one round. Latencies and tokens cover complete answers; requests that Ctrl-C
    interrupted are not counted.

    has_usage: whether the server counted the tokens of every answer. late_s: delay between a
    request's due time and its sending, caused by this client.
    """

    requests: int
    completed: int
    lasted_s: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    has_usage: bool
    peak_concurrency: int
    client_cpu: float
    latencies: Mapping[str, Spread]
    late_s: Spread
    goodput: Mapping[str, Goodput]
    errors: Mapping[str, int]


def figures(
    samples: Sequence[Sample],
    lasted_s: float,
    classes: Mapping[str, Budgets],
    client_cpu: float = 0.0,
) -> Figures:
    """Computes the figures of one round. O(messages · log messages).

    A request that named a class is judged by that class, one that named none by every class.
    """
    counted = [s for s in samples if s.problem != STOPPED]
    complete = [s for s in counted if s.complete]
    duration_s = max(lasted_s, 1e-9)
    tokens = sum(s.output_tokens for s in complete)
    return Figures(
        requests=len(counted),
        completed=len(complete),
        lasted_s=lasted_s,
        requests_per_s=len(complete) / duration_s,
        tokens_per_s=tokens / duration_s,
        prompt_tokens=sum(s.prompt_tokens for s in complete),
        output_tokens=tokens,
        has_usage=all(s.has_usage for s in complete),
        peak_concurrency=peak_concurrency(samples),
        client_cpu=client_cpu,
        latencies={
            name: Spread.from_values(values(complete)) for name, values in LATENCIES.items()
        },
        late_s=Spread.from_values(max(0.0, s.sent_s - s.due_s) for s in complete),
        goodput={
            name: _goodput([s for s in counted if s.sla_class in ("", name)], budgets, duration_s)
            for name, budgets in classes.items()
        },
        errors=dict(Counter(error_kind(s.problem) for s in counted if s.problem).most_common()),
    )


def _goodput(samples: Sequence[Sample], budgets: Budgets, duration_s: float) -> Goodput:
    met = sum(map(budgets.met_by, samples))
    return Goodput(met, len(samples), met / duration_s)


def error_kind(problem: str) -> str:
    """Returns the message without ids, so that equal errors are counted together."""
    return ID.sub("…", problem)


def peak_concurrency(samples: Iterable[Sample]) -> int:
    """Returns the largest number of requests in flight at one time."""
    edges = sorted(edge for s in samples for edge in ((s.sent_s, 1), (s.end_s, -1)))
    current = peak = 0
    for _, step in edges:
        current += step
        peak = max(peak, current)
    return peak


@dataclass(frozen=True)
class Timeline:
    """Tokens per second and requests in flight, at the start of equal time steps."""

    at_s: list[float]
    tokens_per_s: list[float]
    running: list[int]


def timeline(samples: Sequence[Sample], lasted_s: float, steps: int = 60) -> Timeline:
    """Computes the timeline; an answer's tokens are spread evenly over its messages.

    O(messages + steps · requests).
    """
    step_s = max(lasted_s, 1e-9) / steps
    generated = [0.0] * steps
    for sample in samples:
        share = sample.output_tokens / max(1, len(sample.text_s))
        for at_s in sample.text_s:
            generated[min(steps - 1, int(at_s / step_s))] += share
    at = [number * step_s for number in range(steps)]
    running = [sum(s.sent_s <= t < s.end_s for s in samples) for t in at]
    return Timeline(at, [tokens / step_s for tokens in generated], running)
