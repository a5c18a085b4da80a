"""Figures of a load from its samples: latencies, throughput, goodput, errors. Pure."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from statistics import fmean
from types import MappingProxyType

from foretoken.bench.samples import STOPPED, Sample

SHARES = (0.5, 0.9, 0.99)
ID = re.compile(r"\b(?=[\w-]*\d)(?=[\w-]*[a-zA-Z-])[\w-]{6,}\b")  # in an error's message


@dataclass(frozen=True)
class Budgets:
    """What a class promises, in seconds; what is infinite does not count."""

    ttft_s: float = inf
    tpot_s: float = inf
    mtpot_s: float = inf

    def met_by(self, sample: Sample) -> bool:
        """A whole answer within all of them."""
        return (
            sample.whole
            and sample.ttft_s <= self.ttft_s
            and (sample.tpot_s or 0.0) <= self.tpot_s
            and sample.longest_gap_s <= self.mtpot_s
        )


@dataclass(frozen=True)
class Spread:
    """Of one latency over a load; NaN throughout where there was none."""

    mean: float
    p50: float
    p90: float
    p99: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> "Spread":
        ordered = sorted(values)
        if not ordered:
            return cls(nan, nan, nan, nan, nan, 0)
        p50, p90, p99 = (quantile(ordered, share) for share in SHARES)
        return cls(fmean(ordered), p50, p90, p99, ordered[-1], len(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of sorted values, between two of them in proportion, as numpy does."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


@dataclass(frozen=True)
class Goodput:
    """Of one SLA class: requests that kept its budgets."""

    met: int
    of: int
    per_s: float

    @property
    def share(self) -> float:
        return self.met / self.of if self.of else nan


LATENCIES: Mapping[str, Callable[[Sequence[Sample]], Iterable[float]]] = MappingProxyType(
    {
        "ttft_s": lambda whole: (s.ttft_s for s in whole),
        "tpot_s": lambda whole: (s.tpot_s for s in whole if s.tpot_s is not None),
        "itl_s": lambda whole: (gap for s in whole for gap in s.gaps_s),
        "longest_gap_s": lambda whole: (s.longest_gap_s for s in whole if len(s.text_s) > 1),
        "e2e_s": lambda whole: (s.e2e_s for s in whole),
    }
)


@dataclass(frozen=True)
class Figures:
    """Of one round. Latencies and tokens are of whole answers; those that were hung up on by a
    Ctrl-C count nowhere.

    counted: whether tokens are the server's own count for all of them. late_s: between a request's
    due time and its sending, this client's own doing.
    """

    requests: int
    whole: int
    lasted_s: float
    requests_per_s: float
    tokens_per_s: float
    prompt_tokens: int
    output_tokens: int
    counted: bool
    at_once: int
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
    """A request that named a class is judged by that alone, one that named none by each.

    O(messages · log messages).
    """
    heard = [s for s in samples if s.problem != STOPPED]
    whole = [s for s in heard if s.whole]
    lasts_s = max(lasted_s, 1e-9)
    tokens = sum(s.output_tokens for s in whole)
    return Figures(
        requests=len(heard),
        whole=len(whole),
        lasted_s=lasted_s,
        requests_per_s=len(whole) / lasts_s,
        tokens_per_s=tokens / lasts_s,
        prompt_tokens=sum(s.prompt_tokens for s in whole),
        output_tokens=tokens,
        counted=all(s.told for s in whole),
        at_once=most_at_once(samples),
        client_cpu=client_cpu,
        latencies={name: Spread.of(take(whole)) for name, take in LATENCIES.items()},
        late_s=Spread.of(max(0.0, s.sent_s - s.due_s) for s in whole),
        goodput={
            name: _goodput([s for s in heard if s.sla_class in ("", name)], budgets, lasts_s)
            for name, budgets in classes.items()
        },
        errors=dict(Counter(kind_of(s.problem) for s in heard if s.problem).most_common()),
    )


def _goodput(samples: Sequence[Sample], budgets: Budgets, lasts_s: float) -> Goodput:
    met = sum(map(budgets.met_by, samples))
    return Goodput(met, len(samples), met / lasts_s)


def kind_of(problem: str) -> str:
    """Problems that differ by an id alone are of one kind."""
    return ID.sub("…", problem)


def most_at_once(samples: Iterable[Sample]) -> int:
    """Requests under way together, at most."""
    edges = sorted(edge for s in samples for edge in ((s.sent_s, 1), (s.end_s, -1)))
    now = most = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


@dataclass(frozen=True)
class Timeline:
    """By equal steps of time: tokens a second, and requests under way at each step's begin."""

    at_s: list[float]
    tokens_per_s: list[float]
    running: list[int]


def timeline(samples: Sequence[Sample], lasted_s: float, steps: int = 60) -> Timeline:
    """An answer's tokens are spread evenly over its messages. O(messages + steps · requests)."""
    step_s = max(lasted_s, 1e-9) / steps
    made = [0.0] * steps
    for sample in samples:
        share = sample.output_tokens / max(1, len(sample.text_s))
        for at_s in sample.text_s:
            made[min(steps - 1, int(at_s / step_s))] += share
    at = [number * step_s for number in range(steps)]
    running = [sum(s.sent_s <= t < s.end_s for s in samples) for t in at]
    return Timeline(at, [tokens / step_s for tokens in made], running)
