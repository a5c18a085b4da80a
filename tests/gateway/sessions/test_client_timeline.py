"""When a client took its tokens, beside when they came: gaps, what broke an SLA, and ends."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.sessions.client_timeline import ClientTimeline, find_undelivered_reason
from services.core import FinishReason, Sla
from services.sla import RequestTimeline, SlaMissCause, judge_sla

SLA = Sla("tight", ttft_s=1.0, tpot_s=0.1, mtpot_s=0.5)
STOP = FinishReason.STOP


def came(away: bool = False, placed_s: float = 0.1, rejected: bool = False) -> RequestTimeline:
    return RequestTimeline(0.0, placed_s=placed_s, away=away, rejected=rejected)


def judged(delivery: ClientTimeline, reason: FinishReason = STOP) -> SlaMissCause:
    line = delivery.complete(came())
    line.ended_s = max(line.last_token_s, 0.0)
    return judge_sla(SLA, line, reason)


def sent(*messages: tuple[int, float]) -> ClientTimeline:
    """Messages by tokens, and when they were taken."""
    delivery = ClientTimeline(0.0)
    for tokens, taken_s in messages:
        delivery.on_sent(tokens, taken_s)
    return delivery


def test_timeline_has_the_times_of_delivery() -> None:
    line = sent((1, 0.3), (4, 0.45), (2, 0.9)).complete(came())
    assert (line.tokens, line.ttft_s) == (7, 0.3)
    assert line.decode_s == pytest.approx(0.6)
    assert line.longest_gap_s == pytest.approx(0.45)
    assert line.tpot_s == pytest.approx(0.1)
    assert line.placed_s == 0.1


@pytest.mark.parametrize(
    ("delivery", "expected"),
    [
        (sent((1, 0.2), (9, 0.6)), SlaMissCause.NONE),
        (sent((1, 1.2)), SlaMissCause.PREFILL),  # placed at 0.1
        (sent((9, 0.2), (9, 0.8)), SlaMissCause.DECODE),  # a gap of 0.6 of the allowed 0.5
        (sent((1, 0.2), (1, 0.4), (1, 0.6)), SlaMissCause.DECODE),  # 0.2 apart, of the allowed 0.1
    ],
)
def test_late_delivery_counts_whatever_its_cause(
    delivery: ClientTimeline, expected: SlaMissCause
) -> None:
    """A client that does not read, and a gateway that does not write, look the same."""
    assert judged(delivery) is expected


@pytest.mark.parametrize(
    ("back", "swap_in_s", "expected"),
    [
        (3, 0.0, SlaMissCause.PREEMPTED),
        (3, 0.5, SlaMissCause.SWAP_IN),
        (3, 0.2, SlaMissCause.PREEMPTED),
        (2, 0.5, SlaMissCause.DECODE),  # it was away before tokens that came without a gap
        (9, 0.5, SlaMissCause.DECODE),  # and after all that was sent
        (4, 0.5, SlaMissCause.SWAP_IN),  # a message waited for what was kept back, or for its turn
    ],
)
def test_gap_of_a_preemption_is_the_one_before_the_resumed_token(
    back: int, swap_in_s: float, expected: SlaMissCause
) -> None:
    """Three tokens go out, then, 0.6 s later, three more; it was away before token `back`."""
    delivery = sent((1, 0.1), (2, 0.15))
    if back == 2:
        delivery = ClientTimeline(0.0)
        delivery.on_sent(1, 0.1)
        delivery.on_resumed(back, swap_in_s)
        delivery.on_sent(2, 0.15)
    else:
        delivery.on_resumed(back, swap_in_s)
    delivery.on_sent(3, 0.75)
    assert judged(delivery) is expected


def test_two_preemptions_within_one_message_count_as_one() -> None:
    delivery = sent((1, 0.1))
    delivery.on_resumed(1, 0.2)
    delivery.on_resumed(2, 0.2)
    delivery.on_sent(2, 0.8)
    line = delivery.complete(came())
    assert (line.preempted_gap_s, line.swap_in_gap_s) == pytest.approx((0.7, 0.4))


def test_end_without_tokens_has_the_cause_of_its_wait() -> None:
    delivery = sent((1, 0.1))
    line = delivery.complete(came(away=True))
    line.ended_s = 5.0
    assert judge_sla(SLA, line, FinishReason.DEADLINE) is SlaMissCause.PREEMPTED
    nothing = ClientTimeline(0.0).complete(came(placed_s=inf))
    nothing.ended_s = 0.5
    assert judge_sla(SLA, nothing, FinishReason.DEADLINE) is SlaMissCause.QUEUED
    refused = ClientTimeline(0.0).complete(came(rejected=True))
    assert judge_sla(SLA, refused, FinishReason.ERROR) is SlaMissCause.REJECTED


@pytest.mark.parametrize("reason", [None, *FinishReason])
@pytest.mark.parametrize("broken", [None, FinishReason.ERROR, FinishReason.DEADLINE])
def test_undelivered_end_has_the_call_s_reason(
    reason: FinishReason | None, broken: FinishReason | None
) -> None:
    reported = find_undelivered_reason(reason, broken)
    if reason in (FinishReason.ERROR, FinishReason.DEADLINE):
        assert reported is reason
    else:  # whatever had come: its client left before it had it, or the call broke
        assert reported is (broken or FinishReason.CANCELLED)


MESSAGES = st.lists(
    st.tuples(st.integers(1, 5), st.floats(0, 4, width=32), st.booleans()),
    min_size=1,
    max_size=12,
)


@given(MESSAGES)
def test_timeline_equals_a_recount_of_all_messages(
    messages: list[tuple[int, float, bool]],
) -> None:
    """(tokens, how long until taken, whether away before its last token)"""
    delivery, now_s, at = ClientTimeline(0.0), 0.0, 0
    took: list[tuple[float, bool]] = []
    for tokens, wait_s, away in messages:
        now_s += wait_s
        if away and at + tokens > 1:
            delivery.on_resumed(at + tokens - 1, 0.0)
        delivery.on_sent(tokens, now_s)
        took.append((now_s, away and at + tokens > 1))
        at += tokens
    line = delivery.complete(came())
    gaps = [(later[0] - before[0], later[1]) for before, later in pairwise(took)]
    assert line.tokens == at
    assert line.ttft_s == took[0][0]
    assert line.longest_gap_s == max((gap for gap, _ in gaps), default=0.0)
    assert line.preempted_s == pytest.approx(sum(g for g, away in gaps if away))
