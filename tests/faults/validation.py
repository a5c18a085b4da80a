"""Compares what was delivered under faults with the answers of an undisturbed run. Pure."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from math import ceil

from foretoken.client.answers import Choice

# What a client may get instead of an answer while parts of the system are lost.
DOCUMENTED = ("Unavailable", "Overloaded")
SHOWN = 20  # statuses and requests of a report
QUANTILES = {"p50": 0.5, "p99": 0.99, "max": 1.0}  # of gaps, by name


class Verdict(StrEnum):
    """About one request. All but the first three are failures of the system."""

    RIGHT = "right"
    CANCELLED = "cancelled"  # by the client; the tokens before are right
    REFUSED = "refused"  # with a documented status; the tokens before are right
    FAILED = "failed"  # with another status
    LOST = "lost"  # without an end
    MISSING = "missing"  # parts of the answer
    DUPLICATED = "duplicated"  # parts of the answer
    WRONG = "wrong"


ALLOWED = (Verdict.RIGHT, Verdict.CANCELLED, Verdict.REFUSED)


@dataclass(frozen=True)
class Delivery:
    """What a client received: the choices as far as they came, and how the answer ended.

    by_text: the texts count, and not the tokens, which may go beyond a stop string. status: name of
    the client's exception, with its message; empty without one. arrivals_s: of tokens, by choice.
    """

    number: int  # of the request
    choices: Sequence[Choice]
    by_text: bool = False
    cancelled: bool = False
    ended: bool = True
    status: str = ""
    message: str = ""
    arrivals_s: Sequence[Sequence[float]] = ()


@dataclass(frozen=True)
class Injected:
    """A fault that was injected, with the time at which it was healed."""

    fault: str
    target: str
    began_s: float
    healed_s: float


@dataclass
class Report:
    """Counts of verdicts and refusals, and the longest gap of each stream by fault."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    statuses: Counter[str] = field(default_factory=Counter)
    gaps_s: dict[str, list[float]] = field(default_factory=dict)
    faults: Counter[str] = field(default_factory=Counter)
    evidence: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return all(verdict in ALLOWED for verdict in self.verdicts)

    def add(self, fault: Injected, deliveries: Sequence[Delivery]) -> None:
        """Counts the fault by its kind and the kind of its target."""
        kind = f"{fault.fault} {fault.target.partition('-')[0]}"
        self.faults[kind] += 1
        self.gaps_s.setdefault(kind, []).extend(longest_gaps(deliveries, fault))

    def figures(self) -> dict[str, object]:
        """The report as values of JSON. Faults by kind, with the gaps of the streams that they
        met."""
        return {
            "requests": self.verdicts.total(),
            "verdicts": {each.value: self.verdicts[each] for each in Verdict},
            "statuses": dict(self.statuses.most_common(SHOWN)),
            "faults": {
                fault: {
                    "faults": number,
                    "streams": len(self.gaps_s[fault]),
                    "longest_gap_s": self._gap_quantiles(fault),
                }
                for fault, number in sorted(self.faults.items())
            },
            "evidence": self.evidence[:SHOWN],
        }

    def __str__(self) -> str:
        counts = ", ".join(f"{self.verdicts[each]} {each}" for each in Verdict)
        rows = [f"{self.verdicts.total()} requests: {counts}"]
        rows += [f"  {number} x {status}" for status, number in self.statuses.most_common(SHOWN)]
        rows += ["longest gap of a stream, seconds:  faults  streams    p50    p99    max"]
        for fault, number in sorted(self.faults.items()):
            shown = "".join(f"{gap_s:7.2f}" for gap_s in self._gap_quantiles(fault).values())
            rows.append(f"  {fault:31}{number:8d}{len(self.gaps_s[fault]):9d}{shown}")
        return "\n".join([*rows, *self.evidence[:SHOWN]])

    def _gap_quantiles(self, fault: str) -> dict[str, float]:
        """Empty if the faults of this kind met no stream."""
        gaps = sorted(self.gaps_s[fault])
        return {name: round(quantile(gaps, share), 3) for name, share in QUANTILES.items() if gaps}


def quantile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least this share does not exceed."""
    return ascending[ceil(share * len(ascending)) - 1]


def compare(want: Sequence[object], got: Sequence[object], complete: bool) -> Verdict:
    """The verdict on tokens or text. Those that are not complete may end early. O(n²) if a part is
    missing or duplicated."""
    common = next(
        (at for at, pair in enumerate(zip(want, got, strict=False)) if pair[0] != pair[1]),
        min(len(want), len(got)),
    )
    if common == len(got):
        return Verdict.RIGHT if common == len(want) or not complete else Verdict.MISSING
    for size in range(1, common + 1):
        twice = got[common : common + size] == got[common - size : common]
        rest = got[common + size :]
        if twice and rest == want[common : common + len(rest)]:
            return Verdict.DUPLICATED
    rest = got[common:]
    for size in range(1, len(want) - common):
        if want[common + size :][: len(rest)] == rest:
            return Verdict.MISSING
    return Verdict.WRONG


def judge(expected: Sequence[Choice], delivery: Delivery) -> Verdict:
    """The verdict on a request that has the choices `expected` in a run without faults."""
    has_end = delivery.ended and not delivery.cancelled and not delivery.status
    for want, got in zip(expected, delivery.choices, strict=True):
        complete = got.finish_reason is not None
        verdict = compare(want.text, got.text, complete)
        if not delivery.by_text and verdict is Verdict.RIGHT:
            verdict = compare(want.token_ids, got.token_ids, complete)
        if verdict is not Verdict.RIGHT:
            return verdict
        if got.finish_reason not in (want.finish_reason, None):
            return Verdict.WRONG
        if has_end and not complete:
            return Verdict.LOST
    if delivery.status:
        return Verdict.REFUSED if delivery.status in DOCUMENTED else Verdict.FAILED
    if not delivery.ended:
        return Verdict.LOST
    return Verdict.CANCELLED if delivery.cancelled else Verdict.RIGHT


def longest_gaps(deliveries: Sequence[Delivery], fault: Injected) -> Iterator[float]:
    """The longest of each stream's gaps that overlap the fault."""
    for stream in (each for delivery in deliveries for each in delivery.arrivals_s):
        if len(stream) > 1 and stream[0] < fault.healed_s and stream[-1] > fault.began_s:
            yield max(
                after - before
                for before, after in pairwise(stream)
                if before < fault.healed_s and after > fault.began_s
            )


def summarize(
    expected: Mapping[int, Sequence[Choice]],
    deliveries: Sequence[Delivery],
    faults: Sequence[Injected],
) -> Report:
    """The report of a run. Evidence is about the requests that show a failure of the system."""
    report = Report()
    for delivery in deliveries:
        verdict = judge(expected[delivery.number], delivery)
        report.verdicts[verdict] += 1
        if delivery.status:
            report.statuses[f"{delivery.status}: {delivery.message}"] += 1
        if verdict not in ALLOWED:
            report.evidence.append(_describe(verdict, expected[delivery.number], delivery))
    for fault in faults:
        report.add(fault, deliveries)
    return report


def _describe(verdict: Verdict, expected: Sequence[Choice], delivery: Delivery) -> str:
    lines = [f"request {delivery.number} is {verdict}: {delivery.status} {delivery.message}"]
    for want, got in zip(expected, delivery.choices, strict=True):
        lines.append(f"  expected {want.finish_reason} {want.token_ids} {want.text!r}")
        lines.append(f"  got      {got.finish_reason} {got.token_ids} {got.text!r}")
    return "\n".join(lines)
