"""SLA classes as requests name them, and verdicts worked by hand."""

from math import inf, nan

import pytest

from gateway.config import SLA_CLASSES, GatewayConfig, SlaClass
from gateway.requests.sla import SlaError, parse_header, resolve
from services.core import FinishReason, Sla
from services.verdict import Cause, Timeline, verdict

CLASSES = {name: kind.named(name) for name, kind in SLA_CLASSES.items()}
TIGHT = Sla("tight", ttft_s=1.0, tpot_s=0.1, mtpot_s=0.5)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        ("", Sla("standard", 5.0, 0.1, 1.5)),
        ("interactive", Sla("interactive", 1.0, 0.05, 0.5)),
        ("ttft_s=0.5,tpot_s=0.05,mtpot_s=0.2", Sla("custom", 0.5, 0.05, 0.2)),
        ("tpot_s=0.05", Sla("custom", inf, 0.05, inf)),
        (" interactive , ttft_s = 0.3 ", Sla("custom", 0.3, 0.05, 0.5)),
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


def test_no_class_of_the_config_is_called_as_those_that_clients_make() -> None:
    with pytest.raises(ValueError, match="'custom' are those with budgets of their own"):
        GatewayConfig(sla_classes={"custom": SlaClass(), "standard": SlaClass()})


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


def swapped(away_s: float, resumed_s: float, back_s: float, ended_s: float = 10.0) -> Timeline:
    """A token at 0.5; preempted, resumed out of host memory, and the next token at `back_s`."""
    made = line(tokens=(0.5,), ended_s=ended_s)
    if away_s < inf:
        made.on_preempted()
    if resumed_s < inf:
        made.on_resumed(True, resumed_s)
    if back_s < inf:
        made.on_tokens(1, back_s)
    return made


@pytest.mark.parametrize(
    ("timeline", "reason", "expected"),
    [
        # MTPOT 0.5: the gap is 0.5 → back; the longer half of it is the cause.
        (swapped(0.6, 0.7, 1.2), FinishReason.STOP, Cause.SWAP_IN),
        (swapped(0.6, 1.1, 1.2), FinishReason.STOP, Cause.PREEMPTED),
        (swapped(0.6, 0.62, 0.8), FinishReason.STOP, Cause.SWAP_IN),  # TPOT 0.1
        (swapped(0.6, 0.75, 0.8), FinishReason.STOP, Cause.PREEMPTED),
        (swapped(0.6, 0.7, inf, ended_s=2.0), FinishReason.DEADLINE, Cause.SWAP_IN),
        (swapped(0.6, 1.9, inf, ended_s=2.0), FinishReason.DEADLINE, Cause.PREEMPTED),
        (swapped(0.6, inf, inf, ended_s=2.0), FinishReason.DEADLINE, Cause.PREEMPTED),
        (swapped(0.6, 0.7, inf, ended_s=0.5), FinishReason.DEADLINE, Cause.PREEMPTED),
        # A token that was under way when it was preempted does not hide that it was away.
        (swapped(inf, 0.7, 1.2), FinishReason.STOP, Cause.SWAP_IN),
    ],
)
def test_verdicts_of_who_was_swapped_out(
    timeline: Timeline, reason: FinishReason, expected: Cause
) -> None:
    assert verdict(TIGHT, timeline, reason) is expected


def test_who_is_preempted_again_while_it_comes_back_waits_anew() -> None:
    made = swapped(0.6, 0.7, inf)
    made.on_preempted()
    made.on_tokens(1, 1.2)
    assert verdict(TIGHT, made, FinishReason.STOP) is Cause.PREEMPTED


def test_who_resumes_without_a_swap_was_preempted() -> None:
    made = line(tokens=(0.5,))
    made.on_preempted()
    made.on_resumed(False, 0.6)
    made.on_tokens(1, 1.2)
    assert verdict(TIGHT, made, FinishReason.STOP) is Cause.PREEMPTED


def test_the_longest_gap_is_judged_by_its_own_swap() -> None:
    made = swapped(0.6, 0.7, 1.2)  # a gap of 0.7, of which 0.5 by the swap
    made.on_preempted()
    made.on_resumed(True, 2.1)
    made.on_tokens(1, 2.2)  # a gap of 1.0, of which 0.1
    assert verdict(TIGHT, made, FinishReason.STOP) is Cause.PREEMPTED
    assert (made.swap_in_s, made.preempted_s) == pytest.approx((0.6, 1.7))


def test_a_batch_class_is_kept_however_long_it_takes() -> None:
    assert verdict(CLASSES["batch"], line(50, (90.0, 99.0)), FinishReason.STOP) is Cause.NONE
