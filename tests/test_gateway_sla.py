"""SLA classes as requests name them, and verdicts worked by hand."""

from math import inf, nan

import pytest

from gateway.config import SLA_CLASSES
from gateway.sla import Cause, SlaError, Timeline, parse_header, resolve, verdict
from services.core import FinishReason, Sla

CLASSES = {name: kind.named(name) for name, kind in SLA_CLASSES.items()}
TIGHT = Sla("tight", ttft_s=1.0, tpot_s=0.1, mtpot_s=0.5)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", Sla("standard", 5.0, 0.1, 1.5)),
        ("interactive", Sla("interactive", 1.0, 0.05, 0.5)),
        ("ttft_s=0.5,tpot_s=0.05,mtpot_s=0.2", Sla("custom", 0.5, 0.05, 0.2)),
        ("tpot_s=0.05", Sla("custom", inf, 0.05, inf)),
        (" interactive , ttft_s = 0.3 ", Sla("interactive", 0.3, 0.05, 0.5)),
        ("batch", Sla("batch", inf, inf, inf)),
    ],
)
def test_header(header: str, expected: Sla) -> None:
    assert resolve(CLASSES, "standard", *parse_header(header)) == expected


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ("gold", "unknown class 'gold'; known: interactive, standard, batch"),
        ("interactive,batch", "names two classes"),
        ("ttft_s=soon", "ttft_s must be a number of seconds, not 'soon'"),
        ("ttft_s=-1", "ttft_s must be a positive number"),
        ("ttft_s=nan", "ttft_s must be a positive number"),
        ("ttft_s=inf", "ttft_s must be a positive number"),
        ("ttft=1", "unknown budget 'ttft'; known: ttft_s, tpot_s, mtpot_s"),
    ],
)
def test_bad_headers(header: str, complaint: str) -> None:
    with pytest.raises(SlaError, match=complaint):
        resolve(CLASSES, "standard", *parse_header(header))


def test_nan_is_no_budget() -> None:
    with pytest.raises(SlaError, match="ttft_s"):
        resolve(CLASSES, "standard", "", {"ttft_s": nan})


def line(
    placed_s: float = 0.1, tokens: tuple[float, ...] = (), away_before: tuple[int, ...] = (),
    ended_s: float = 10.0, rejected: bool = False,
) -> Timeline:  # fmt: skip
    """A timeline from 0: token times, and which of them came after a preemption."""
    made = Timeline(0.0, placed_s, rejected=rejected)
    for at, now_s in enumerate(tokens):
        made.away = at in away_before
        made.on_tokens(1, now_s)
    made.ended_s = ended_s
    return made


STEADY = (0.5, 0.55, 0.6, 0.65)


@pytest.mark.parametrize(
    ("timeline", "reason", "expected"),
    [
        (line(tokens=STEADY), FinishReason.STOP, Cause.NONE),
        (line(tokens=STEADY), FinishReason.LENGTH, Cause.NONE),
        (line(rejected=True), FinishReason.ERROR, Cause.REJECTED),
        (line(placed_s=0.9, tokens=(1.2,)), FinishReason.STOP, Cause.QUEUED),
        (line(placed_s=0.3, tokens=(1.2,)), FinishReason.STOP, Cause.PREFILL),
        (line(placed_s=inf, ended_s=2.0), FinishReason.DEADLINE, Cause.QUEUED),
        (line(placed_s=inf, ended_s=0.5), FinishReason.DEADLINE, Cause.QUEUED),
        (line(placed_s=0.1, ended_s=0.5), FinishReason.DEADLINE, Cause.PREFILL),
        (line(tokens=(0.5, 0.55, 1.2)), FinishReason.STOP, Cause.DECODE),
        (line(tokens=(0.5, 0.55, 1.2), away_before=(2,)), FinishReason.STOP, Cause.PREEMPTED),
        (line(tokens=(0.5, 0.65, 0.8)), FinishReason.STOP, Cause.DECODE),
        (line(tokens=(0.5, 0.55, 0.9), away_before=(2,)), FinishReason.STOP, Cause.PREEMPTED),
        (line(tokens=STEADY), FinishReason.CANCELLED, Cause.CLIENT),
        (line(tokens=STEADY), FinishReason.DEADLINE, Cause.DECODE),
        (line(placed_s=inf, ended_s=0.2), FinishReason.CANCELLED, Cause.CLIENT),
    ],
)
def test_verdicts(timeline: Timeline, reason: FinishReason, expected: Cause) -> None:
    assert verdict(TIGHT, timeline, reason) is expected


def test_a_batch_class_is_kept_however_long_it_takes() -> None:
    assert verdict(CLASSES["batch"], line(50, (90.0, 99.0)), FinishReason.STOP) is Cause.NONE
