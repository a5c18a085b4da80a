"""Tokens that are reserved for a key's request by the forecast of its answer."""

from dataclasses import astuple
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.key_limits import Change, Grant, KeyLimiter, KeyUsage
from gateway.types.errors import KeyLimitReached
from gateway.types.key_limits import KeyLimits
from services.runtime.border import COUNT

START = None  # in place of tokens: a worker has the choice


@pytest.mark.parametrize(
    ("reserved", "forecasts", "left", "queued"),
    [  # of 100 tokens each; a forecast: choice, tokens
        ([60], [], 40, 60),
        ([60], [(0, 20)], 80, 20),
        ([60], [(0, 20), (0, 30)], 70, 30),
        ([60], [(0, 90)], 10, 90),
        ([30, 20], [(1, 5)], 65, 35),
        ([30, 20], [(1, 5), (0, 40)], 55, 45),
        ([900], [], 0, 900),  # a full bucket
        ([900], [(0, 99)], 1, 99),
        ([900], [(0, 800)], 0, 800),
        ([60], [(0, 900)], 0, 900),
        ([60], [(0, START)], 40, 0),
        ([60], [(0, START), (0, 20)], 80, 0),
        ([30, 20], [(0, START), (0, 90), (1, 5)], 5, 5),
    ],
)
def test_a_forecast_takes_the_place_of_what_was_reserved(
    reserved: list[int], forecasts: list[tuple[int, int | None]], left: int, queued: int
) -> None:
    limiter = KeyLimiter({"ada": KeyLimits(tokens_per_minute=100, queued_tokens=100)})
    grant = admit(limiter, reserved)
    for choice, tokens in forecasts:
        if tokens is None:
            grant.start(choice, 0)
        else:
            grant.expect(choice, tokens, 0)
    assert (remaining(grant.usage), grant.usage.queued_tokens) == (left, queued)
    grant.settle(7, 0)
    grant.expect(0, 50, 0)  # too late
    assert (remaining(grant.usage), grant.usage.queued_tokens) == (93, 0)


def test_a_request_that_needs_more_delays_only_later_ones() -> None:
    limiter = KeyLimiter({"ada": KeyLimits(tokens_per_minute=60)})
    first, _ = admit(limiter, [30]), admit(limiter, [30])
    first.expect(0, 50, 0)  # 20 more than there are
    with pytest.raises(KeyLimitReached, match=r"has 0 tokens left of its limit of 60") as caught:
        admit(limiter, [10])
    assert caught.value.retry_after_s == 30
    first.settle(20, 0)
    admit(limiter, [10])


@pytest.mark.parametrize(
    ("limits", "counts"),
    [
        (KeyLimits(tokens_per_minute=9), True),
        (KeyLimits(queued_tokens=9), True),
        (KeyLimits(requests_per_minute=9, concurrent_requests=9, weight=2), False),
    ],
)
def test_a_forecast_counts_where_tokens_are_limited(limits: KeyLimits, counts: bool) -> None:
    limiter = KeyLimiter({"ada": limits})
    grant = admit(limiter, [5])
    assert grant.counts_tokens is counts
    grant.expect(0, COUNT[1], 0)
    grant.settle(5, 0)
    assert grant.usage.running == grant.usage.queued_tokens == 0


Act = Literal["admit", "expect", "start", "settle", "cancel"]
ACTS = st.lists(
    st.tuples(
        st.sampled_from(["admit", "expect", "expect", "start", "settle", "cancel"]),
        st.integers(0, 3),  # of the open requests
        st.lists(st.integers(1, 60), min_size=1, max_size=3),  # tokens of choices
    ),
    max_size=30,
)


@given(ACTS)
def test_reservations_are_those_of_the_open_requests(
    acts: list[tuple[Act, int, list[int]]],
) -> None:
    """What is taken of the bucket and of the queue is the sum over open requests, for this gateway
    and for those that it reports to; nothing stays of ended ones but what they used."""
    most = 200
    limiter = KeyLimiter({"ada": KeyLimits(tokens_per_minute=most, queued_tokens=most)})
    reported: list[Change] = []
    limiter.report = lambda _, change: reported.append(change)
    open_requests: list[tuple[Grant, list[int], list[bool]]] = []  # tokens and whether it waits
    used = requests = 0

    def check() -> None:
        reserved = sum(min(most, sum(tokens)) for _, tokens, _ in open_requests)
        queued = sum(
            each
            for _, tokens, waits in open_requests
            for each, queues in zip(tokens, waits, strict=True)
            if queues
        )
        expected = (requests, reserved + used, len(open_requests), queued)
        assert tuple(map(sum, zip(*map(astuple, reported), strict=True))) == expected
        usage = limiter.find("ada", 0)
        assert usage is not None and usage.tokens is not None
        assert usage.tokens.left(0) == most - reserved - used
        assert (usage.running, usage.queued_tokens) == (len(open_requests), queued)

    for act, at, tokens in (*acts, *[("settle", 0, [3])] * len(acts)):
        if act == "admit":
            try:
                grant = admit(limiter, tokens)
            except KeyLimitReached:
                continue
            open_requests.append((grant, list(tokens), [True] * len(tokens)))
            requests += 1
        elif open_requests:
            grant, needed, waits = open_requests[at % len(open_requests)]
            choice = at % len(needed)
            if act == "expect":
                grant.expect(choice, tokens[0], 0)
                needed[choice] = tokens[0]
            elif act == "start":
                grant.start(choice, 0)
                waits[choice] = False
            else:
                open_requests.pop(at % len(open_requests))
                if act == "settle":
                    grant.settle(tokens[0], 0)
                    used += tokens[0]
                else:
                    grant.cancel(0)
                    requests -= 1
        if reported:
            check()
    assert not open_requests


def admit(limiter: KeyLimiter, tokens: list[int]) -> Grant:
    grant = limiter.reserve("ada", tokens, 0)
    assert grant is not None
    return grant


def remaining(usage: KeyUsage) -> int:
    return int(usage.headers(0)["x-ratelimit-remaining-tokens"])
