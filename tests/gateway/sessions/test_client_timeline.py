"""The timeline of delivered tokens: gaps, causes of SLA misses, and ends."""

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


def generated(away: bool = False, placed_s: float = 0.1, rejected: bool = False) -> RequestTimeline:
    return RequestTimeline(0.0, placed_s=placed_s, away=away, rejected=rejected)


def judge(delivery: ClientTimeline, reason: FinishReason = STOP) -> SlaMissCause:
    timeline = delivery.complete(generated())
    timeline.ended_s = max(timeline.last_token_s, 0.0)
    return judge_sla(SLA, timeline, reason)


def deliver(*messages: tuple[int, float]) -> ClientTimeline:
    """A timeline of messages: their tokens and delivery times."""
    delivery = ClientTimeline(0.0)
    for tokens, sent_s in messages:
        delivery.on_sent(tokens, sent_s)
    return delivery


def test_timeline_has_the_times_of_delivery() -> None:
    timeline = deliver((1, 0.3), (4, 0.45), (2, 0.9)).complete(generated())
    assert (timeline.tokens, timeline.ttft_s) == (7, 0.3)
    assert timeline.decode_s == pytest.approx(0.6)
    assert timeline.longest_gap_s == pytest.approx(0.45)
    assert timeline.tpot_s == pytest.approx(0.1)
    assert timeline.placed_s == 0.1


@pytest.mark.parametrize(
    ("delivery", "expected"),
    [
        (deliver((1, 0.2), (9, 0.6)), SlaMissCause.NONE),
        (deliver((1, 1.2)), SlaMissCause.PREFILL),  # placed at 0.1
        (deliver((9, 0.2), (9, 0.8)), SlaMissCause.DECODE),  # a gap of 0.6 of the allowed 0.5
        (
            deliver((1, 0.2), (1, 0.4), (1, 0.6)),
            SlaMissCause.DECODE,
        ),  # 0.2 apart, of the allowed 0.1
    ],
)
def test_late_delivery_counts_whatever_its_cause(
    delivery: ClientTimeline, expected: SlaMissCause
) -> None:
    """A client that does not read and a gateway that does not write have the same timeline."""
    assert judge(delivery) is expected


@pytest.mark.parametrize(
    ("back", "swap_in_s", "expected"),
    [
        (3, 0.0, SlaMissCause.PREEMPTED),
        (3, 0.5, SlaMissCause.SWAP_IN),
        (3, 0.2, SlaMissCause.PREEMPTED),
        (2, 0.5, SlaMissCause.DECODE),  # preempted before tokens without a gap
        (9, 0.5, SlaMissCause.DECODE),  # preempted after all sent tokens
        (
            4,
            0.5,
            SlaMissCause.SWAP_IN,
        ),  # the message waited for withheld text
    ],
)
def test_gap_of_a_preemption_is_the_one_before_the_resumed_token(
    back: int, swap_in_s: float, expected: SlaMissCause
) -> None:
    """Three tokens, and three more 0.6 s later; the preemption is before token `back`."""
    delivery = deliver((1, 0.1), (2, 0.15))
    if back == 2:
        delivery = ClientTimeline(0.0)
        delivery.on_sent(1, 0.1)
        delivery.on_resumed(back, swap_in_s)
        delivery.on_sent(2, 0.15)
    else:
        delivery.on_resumed(back, swap_in_s)
    delivery.on_sent(3, 0.75)
    assert judge(delivery) is expected


def test_two_preemptions_within_one_message_count_as_one() -> None:
    delivery = deliver((1, 0.1))
    delivery.on_resumed(1, 0.2)
    delivery.on_resumed(2, 0.2)
    delivery.on_sent(2, 0.8)
    timeline = delivery.complete(generated())
    assert (timeline.preempted_gap_s, timeline.swap_in_gap_s) == pytest.approx((0.7, 0.4))


def test_end_without_tokens_has_the_cause_of_its_wait() -> None:
    delivery = deliver((1, 0.1))
    timeline = delivery.complete(generated(away=True))
    timeline.ended_s = 5.0
    assert judge_sla(SLA, timeline, FinishReason.DEADLINE) is SlaMissCause.PREEMPTED
    nothing = ClientTimeline(0.0).complete(generated(placed_s=inf))
    nothing.ended_s = 0.5
    assert judge_sla(SLA, nothing, FinishReason.DEADLINE) is SlaMissCause.QUEUED
    refused = ClientTimeline(0.0).complete(generated(rejected=True))
    assert judge_sla(SLA, refused, FinishReason.ERROR) is SlaMissCause.REJECTED


@pytest.mark.parametrize("reason", [None, *FinishReason])
@pytest.mark.parametrize("broken", [None, FinishReason.ERROR, FinishReason.DEADLINE])
def test_undelivered_end_has_the_call_s_reason(
    reason: FinishReason | None, broken: FinishReason | None
) -> None:
    reported = find_undelivered_reason(reason, broken)
    if reason in (FinishReason.ERROR, FinishReason.DEADLINE):
        assert reported is reason
    else:  # the client disconnected before the end, or the call broke
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
    """Messages are (tokens, seconds since the previous one, preempted before the last token)."""
    delivery, now_s, at = ClientTimeline(0.0), 0.0, 0
    took: list[tuple[float, bool]] = []
    for tokens, wait_s, away in messages:
        now_s += wait_s
        if away and at + tokens > 1:
            delivery.on_resumed(at + tokens - 1, 0.0)
        delivery.on_sent(tokens, now_s)
        took.append((now_s, away and at + tokens > 1))
        at += tokens
    timeline = delivery.complete(generated())
    gaps = [(later[0] - before[0], later[1]) for before, later in pairwise(took)]
    assert timeline.tokens == at
    assert timeline.ttft_s == took[0][0]
    assert timeline.longest_gap_s == max((gap for gap, _ in gaps), default=0.0)
    assert timeline.preempted_s == pytest.approx(sum(g for g, away in gaps if away))
