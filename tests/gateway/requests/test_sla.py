"""SLA classes of requests, and SLA results of given timelines."""

from math import inf, nan

import pytest

from gateway.config import SLA_CLASSES, GatewayConfig, SlaClass
from gateway.types.sla_classes import SlaError, parse_header, resolve
from services.core import FinishReason, Sla
from services.sla import RequestTimeline, SlaMissCause, judge_sla

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
def test_sla_header_selects_class_and_budgets(header: str, expected: Sla) -> None:
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
def test_bad_sla_header_is_an_error(header: str, complaint: str) -> None:
    with pytest.raises(SlaError, match=complaint):
        resolve(CLASSES, "standard", *parse_header(header))


def test_config_refuses_a_class_named_custom() -> None:
    with pytest.raises(ValueError, match="'custom' is reserved for requests with explicit"):
        GatewayConfig(sla_classes={"custom": SlaClass(), "standard": SlaClass()})


def test_nan_budget_is_an_error() -> None:
    with pytest.raises(SlaError, match="ttft_s"):
        resolve(CLASSES, "standard", "", {"ttft_s": nan})


def make_timeline(
    placed_s: float = 0.1, tokens: tuple[float, ...] = (), away_before: tuple[int, ...] = (),
    ended_s: float = 10.0, rejected: bool = False,
) -> RequestTimeline:  # fmt: skip
    """A timeline from 0 s: token times, and the indices of tokens after a preemption."""
    timeline = RequestTimeline(0.0, placed_s, rejected=rejected)
    for at, now_s in enumerate(tokens):
        timeline.away = at in away_before
        timeline.on_tokens(1, now_s)
    timeline.ended_s = ended_s
    return timeline


STEADY = (0.5, 0.55, 0.6, 0.65)


def swapped(
    away_s: float, resumed_s: float, back_s: float, ended_s: float = 10.0
) -> RequestTimeline:
    """A token at 0.5 s, a preemption, a resume from host memory, and a token at `back_s`."""
    timeline = make_timeline(tokens=(0.5,), ended_s=ended_s)
    if away_s < inf:
        timeline.on_preempted()
    if resumed_s < inf:
        timeline.on_resumed(True, resumed_s)
    if back_s < inf:
        timeline.on_tokens(1, back_s)
    return timeline


@pytest.mark.parametrize(
    ("timeline", "reason", "expected"),
    [
        (make_timeline(tokens=STEADY), FinishReason.STOP, SlaMissCause.NONE),
        (make_timeline(tokens=STEADY), FinishReason.LENGTH, SlaMissCause.NONE),
        (make_timeline(rejected=True), FinishReason.ERROR, SlaMissCause.REJECTED),
        (make_timeline(placed_s=0.9, tokens=(1.2,)), FinishReason.STOP, SlaMissCause.QUEUED),
        (make_timeline(placed_s=0.3, tokens=(1.2,)), FinishReason.STOP, SlaMissCause.PREFILL),
        (make_timeline(placed_s=inf, ended_s=2.0), FinishReason.DEADLINE, SlaMissCause.QUEUED),
        (make_timeline(placed_s=inf, ended_s=0.5), FinishReason.DEADLINE, SlaMissCause.QUEUED),
        (make_timeline(placed_s=0.1, ended_s=0.5), FinishReason.DEADLINE, SlaMissCause.PREFILL),
        (make_timeline(tokens=(0.5, 0.55, 1.2)), FinishReason.STOP, SlaMissCause.DECODE),
        (
            make_timeline(tokens=(0.5, 0.55, 1.2), away_before=(2,)),
            FinishReason.STOP,
            SlaMissCause.PREEMPTED,
        ),
        (make_timeline(tokens=(0.5, 0.65, 0.8)), FinishReason.STOP, SlaMissCause.DECODE),
        (
            make_timeline(tokens=(0.5, 0.55, 0.9), away_before=(2,)),
            FinishReason.STOP,
            SlaMissCause.PREEMPTED,
        ),
        (make_timeline(tokens=STEADY), FinishReason.CANCELLED, SlaMissCause.CLIENT),
        (make_timeline(tokens=STEADY), FinishReason.DEADLINE, SlaMissCause.DECODE),
        (make_timeline(placed_s=inf, ended_s=0.2), FinishReason.CANCELLED, SlaMissCause.CLIENT),
        # MTPOT 0.5: the gap is from 0.5 to `back_s`; the longer part of it is the cause.
        (swapped(0.6, 0.7, 1.2), FinishReason.STOP, SlaMissCause.SWAP_IN),
        (swapped(0.6, 1.1, 1.2), FinishReason.STOP, SlaMissCause.PREEMPTED),
        (swapped(0.6, 0.62, 0.8), FinishReason.STOP, SlaMissCause.SWAP_IN),  # TPOT 0.1
        (swapped(0.6, 0.75, 0.8), FinishReason.STOP, SlaMissCause.PREEMPTED),
        (swapped(0.6, 0.7, inf, ended_s=2.0), FinishReason.DEADLINE, SlaMissCause.SWAP_IN),
        (swapped(0.6, 1.9, inf, ended_s=2.0), FinishReason.DEADLINE, SlaMissCause.PREEMPTED),
        (swapped(0.6, inf, inf, ended_s=2.0), FinishReason.DEADLINE, SlaMissCause.PREEMPTED),
        (swapped(0.6, 0.7, inf, ended_s=0.5), FinishReason.DEADLINE, SlaMissCause.PREEMPTED),
        # A token that arrives after the preemption does not hide the preemption.
        (swapped(inf, 0.7, 1.2), FinishReason.STOP, SlaMissCause.SWAP_IN),
    ],
)
def test_sla_result_names_the_cause_of_a_miss(
    timeline: RequestTimeline, reason: FinishReason, expected: SlaMissCause
) -> None:
    assert judge_sla(TIGHT, timeline, reason) is expected


def test_second_preemption_ends_the_swap_in() -> None:
    timeline = swapped(0.6, 0.7, inf)
    timeline.on_preempted()
    timeline.on_tokens(1, 1.2)
    assert judge_sla(TIGHT, timeline, FinishReason.STOP) is SlaMissCause.PREEMPTED


def test_resume_without_swap_counts_as_preempted() -> None:
    timeline = make_timeline(tokens=(0.5,))
    timeline.on_preempted()
    timeline.on_resumed(False, 0.6)
    timeline.on_tokens(1, 1.2)
    assert judge_sla(TIGHT, timeline, FinishReason.STOP) is SlaMissCause.PREEMPTED


def test_longest_gap_is_judged_by_its_own_swap() -> None:
    timeline = swapped(0.6, 0.7, 1.2)  # a gap of 0.7, 0.5 of it the swap
    timeline.on_preempted()
    timeline.on_resumed(True, 2.1)
    timeline.on_tokens(1, 2.2)  # a gap of 1.0, 0.1 of it the swap
    assert judge_sla(TIGHT, timeline, FinishReason.STOP) is SlaMissCause.PREEMPTED
    assert (timeline.swap_in_s, timeline.preempted_s) == pytest.approx((0.6, 1.7))


def test_class_without_limits_is_always_met() -> None:
    assert (
        judge_sla(CLASSES["batch"], make_timeline(50, (90.0, 99.0)), FinishReason.STOP)
        is SlaMissCause.NONE
    )
