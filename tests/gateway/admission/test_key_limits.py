"""Limits of API keys: what is reserved, settled and refused, and their settings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission.key_limits import Grant, KeyLimiter
from gateway.config import GatewayConfig
from gateway.types.errors import KeyLimitReached, RefusalReason
from gateway.types.key_limits import KeyLimits
from services.runtime.config import ConfigError, load
from services.runtime.errors import InvalidArgument

REQUESTS, TOKENS = RefusalReason.KEY_REQUESTS, RefusalReason.KEY_TOKENS
CONCURRENCY, QUEUE = RefusalReason.KEY_CONCURRENCY, RefusalReason.KEY_QUEUE


def attempt(limiter: KeyLimiter, tokens: int, now_s: float, key: str = "ada") -> Grant:
    grant = limiter.reserve(key, [tokens], now_s)
    assert grant is not None
    return grant


@pytest.mark.parametrize(
    ("limits", "arrivals", "reason", "retry_after_s"),
    [  # an arrival: time, tokens reserved, tokens used at its immediate end (None: it still runs)
        (KeyLimits(requests_per_minute=2), [(0, 1, 1), (0, 1, 1)], None, 0),
        (KeyLimits(requests_per_minute=2), [(0, 1, 1), (0, 1, 1), (0, 1, 1)], REQUESTS, 30),
        (KeyLimits(requests_per_minute=2), [(0, 1, 1), (0, 1, 1), (20, 1, 1)], REQUESTS, 10),
        (KeyLimits(requests_per_minute=2), [(0, 1, 1), (0, 1, 1), (30, 1, 1)], None, 0),
        (KeyLimits(tokens_per_minute=60), [(0, 40, None), (0, 20, None)], None, 0),
        (KeyLimits(tokens_per_minute=60), [(0, 40, None), (0, 25, None)], TOKENS, 5),
        (KeyLimits(tokens_per_minute=60), [(0, 40, 30), (0, 30, None)], None, 0),
        (KeyLimits(tokens_per_minute=60), [(0, 40, 70), (0, 20, None)], TOKENS, 30),  # 10 too many
        (KeyLimits(tokens_per_minute=60), [(0, 900, 60), (30, 900, 0)], TOKENS, 30),  # a full one
        (KeyLimits(tokens_per_minute=60), [(0, 900, 60), (60, 900, 0)], None, 0),
        (KeyLimits(concurrent_requests=2), [(0, 9, None), (0, 9, None)], None, 0),
        (KeyLimits(concurrent_requests=2), [(0, 9, None), (0, 9, None), (9, 9, 0)], CONCURRENCY, 1),
        (KeyLimits(concurrent_requests=1), [(0, 9, 9), (0, 9, 9)], None, 0),
        (KeyLimits(queued_tokens=60), [(0, 40, None), (0, 20, None)], None, 0),
        (KeyLimits(queued_tokens=60), [(0, 40, None), (9, 21, None)], QUEUE, 1),
        (KeyLimits(queued_tokens=60), [(0, 40, 40), (0, 60, None)], None, 0),
        (KeyLimits(queued_tokens=60), [(0, 900, None)], None, 0),  # alone in an empty queue
        (KeyLimits(queued_tokens=60), [(0, 900, None), (0, 1, None)], QUEUE, 1),
        (KeyLimits(), [(0, 10**9, None)] * 99, None, 0),
    ],
)  # fmt: skip
def test_reserved_and_settled_tokens_decide(
    limits: KeyLimits,
    arrivals: list[tuple[float, int, int | None]],
    reason: RefusalReason | None,
    retry_after_s: float,
) -> None:
    limiter = KeyLimiter({"ada": limits})
    *before, last = arrivals
    for now_s, reserved, used in before:
        grant = attempt(limiter, reserved, now_s)
        if used is not None:
            grant.settle(used, now_s)
    if reason is None:
        attempt(limiter, last[1], last[0])
        return
    with pytest.raises(KeyLimitReached, match=r"^API key ada ") as caught:
        attempt(limiter, last[1], last[0])
    assert caught.value.reason is reason
    assert caught.value.retry_after_s == pytest.approx(retry_after_s)


def test_a_request_is_settled_once() -> None:
    limiter = KeyLimiter({"ada": KeyLimits(tokens_per_minute=60, concurrent_requests=1)})
    grant = attempt(limiter, 60, 0)
    grant.settle(10, 0)
    grant.settle(10, 0)
    assert grant.usage.headers(0)["x-ratelimit-remaining-tokens"] == "50"
    assert grant.usage.running == 0


def test_tokens_are_queued_until_each_choice_has_a_worker() -> None:
    limiter = KeyLimiter({"ada": KeyLimits(queued_tokens=100)})
    grant = limiter.reserve("ada", [30, 20], 0)
    other = attempt(limiter, 50, 0)
    assert grant is not None
    with pytest.raises(KeyLimitReached, match="its limit of 100 queued tokens") as caught:
        limiter.reserve("ada", [1], 0, drain_s=7.5)
    assert (caught.value.reason, caught.value.retry_after_s) == (QUEUE, 7.5)
    for choice in (1, 1, 0):  # placed again later: no effect
        grant.start(choice, 1)
    assert grant.usage.queued_tokens == 50
    last = attempt(limiter, 50, 1)
    last.settle(0, 2)  # refused by the scheduler: it never had a worker
    grant.settle(9, 2)
    other.cancel(2)
    assert (grant.usage.queued_tokens, grant.usage.running) == (0, 0)


def test_a_cancelled_grant_leaves_no_trace() -> None:
    limits = KeyLimits(requests_per_minute=1, tokens_per_minute=60, concurrent_requests=1)
    limiter = KeyLimiter({"ada": limits})
    grant = attempt(limiter, 60, 0)
    grant.cancel(0)
    grant.settle(30, 0)
    assert grant.usage.idle(0)


def test_divided_limits_keep_what_is_left_of_them() -> None:
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=600, concurrent_requests=3)
    limiter = KeyLimiter({"ada": limits})
    usage = attempt(limiter, 300, 0).usage
    limiter.divide(2, 0)
    headers = usage.headers(0)
    assert headers["x-ratelimit-limit-tokens"] == "300"
    assert headers["x-ratelimit-remaining-tokens"] == "150"  # half of 300
    assert usage.limits.concurrent_requests == 2
    limiter.divide(1, 30)  # half of 300 were refilled
    assert usage.headers(30)["x-ratelimit-remaining-tokens"] == "600"
    assert usage.limits == limits


def test_headers_are_those_of_openai() -> None:
    limits = KeyLimits(requests_per_minute=60, tokens_per_minute=600)
    assert attempt(KeyLimiter({"ada": limits}), 100, 0).usage.headers(0) == {
        "x-ratelimit-limit-requests": "60", "x-ratelimit-remaining-requests": "59",
        "x-ratelimit-reset-requests": "1.000s", "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "500", "x-ratelimit-reset-tokens": "10.000s",
    }  # fmt: skip


def test_a_key_has_its_own_limits_or_those_of_all_others() -> None:
    limiter = KeyLimiter({"ada": KeyLimits(), "*": KeyLimits(requests_per_minute=1)})
    for key in ("ada", "ada", "bob", "eve"):
        attempt(limiter, 1, 0, key)
    with pytest.raises(KeyLimitReached):
        attempt(limiter, 1, 0, "bob")
    assert limiter.reserve("", [1], 0) is None  # without keys
    assert KeyLimiter({}).reserve("ada", [1], 0) is None


def test_keys_without_usage_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.admission.key_limits.MAX_KEYS", 2)
    limiter = KeyLimiter({"*": KeyLimits(requests_per_minute=1)})
    attempt(limiter, 1, 0, "a").settle(1, 0)
    attempt(limiter, 1, 30, "b").settle(1, 30)
    attempt(limiter, 1, 60, "c")  # `a` has its whole minute again
    assert list(limiter._usage) == ["b", "c"]


def test_classes_beyond_those_of_a_key_are_refused() -> None:
    limiter = KeyLimiter({"ada": KeyLimits(sla_classes=("batch",)), "bob": KeyLimits()})
    limiter.check_class("ada", "batch")
    limiter.check_class("bob", "standard")
    limiter.check_class("eve", "standard")
    with pytest.raises(InvalidArgument, match=r"^sla_class: API key ada may not use 'standard'"):
        limiter.check_class("ada", "standard")


Step = tuple[int, int, int, int]  # tenths of a second, reserved, used, steps until the end
STEPS = st.lists(
    st.tuples(*(st.integers(0, most) for most in (300, 40, 40, 3))), min_size=1, max_size=40
)


@given(STEPS)
def test_no_minute_has_more_than_the_bucket_and_its_refill(steps: list[Step]) -> None:
    """By brute force: what was used or is reserved from any admission on is at most a full bucket,
    a refill of the time since, and what answers had beyond their reservation."""
    per_minute, now_s = 60, 0.0
    limiter = KeyLimiter({"ada": KeyLimits(tokens_per_minute=per_minute)})
    admitted: list[tuple[float, int, Grant]] = []
    running: list[tuple[int, int, Grant]] = []
    excess = 0
    for index, (tenths, reserved, used, lasts) in enumerate(steps):
        now_s += tenths / 10
        try:
            grant = attempt(limiter, reserved, now_s)
        except KeyLimitReached as refusal:
            assert 1.0 <= refusal.retry_after_s <= 2 * 60.0 * (1 + len(steps))
        else:
            admitted.append((now_s, reserved, grant))
            running.append((index + lasts, used, grant))
            for begin, (since_s, *_) in enumerate(admitted):
                taken = sum(each for _, each, _ in admitted[begin:])
                returned = sum(g.reserved for _, _, g in admitted if g.settled)
                assert taken <= per_minute * (1 + (now_s - since_s) / 60) + returned + 1e-3
        for _, spent, ended in [each for each in running if each[0] <= index]:
            excess += max(0, spent - ended.reserved)
            ended.settle(spent, now_s)
        running = [each for each in running if each[0] > index]
    usage = limiter.find("ada", now_s)
    assert usage is not None and usage.running == len(running)
    for _, spent, ended in running:
        ended.settle(spent, now_s)
    assert usage.running == 0
    assert usage.find_refusal(per_minute, now_s + 60 * (2 + excess / per_minute)) is None


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ('{"ada": {"requests": 3}}', "key_limits.ada: requests is not a limit of a key; known: "),
        ('{"ada": {"requests_per_minute": -3}}', "key_limits.ada.requests_per_minute: "),
        ('{"ada": {"tokens_per_minute": 1e30}}', "key_limits.ada.tokens_per_minute: "),
        ('{"ada": {"concurrent_requests": true}}', "key_limits.ada.concurrent_requests: "),
        ('{"ada": {"sla_classes": ["fast"]}}', ": key_limits.ada.sla_classes: 'fast' is no SLA "),
        ('{"ada": {"queued_tokens": 0}}', "key_limits.ada.queued_tokens: "),
        ('{"ada": {"weight": 0}}', "key_limits.ada.weight: "),
        ('{"ada": {"weight": NaN}}', "key_limits.ada.weight: "),
        ('{"ada": {"weight": "2"}}', "key_limits.ada.weight: "),
        ('{"a b": {}}', "key_limits: 'a b' is not a key's name; "),
    ],
)
def test_a_faulty_setting_names_the_key_and_the_field(value: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=r"^gateway") as caught:
        load(GatewayConfig, {"key_limits": value})
    assert fault in str(caught.value)


def test_gateways_divide_the_limits_of_a_key() -> None:
    same: dict[str, Any] = {"weight": 2.0, "sla_classes": ("batch",)}
    whole = KeyLimits(tokens_per_minute=10, concurrent_requests=1, queued_tokens=6, **same)
    limiter = KeyLimiter({"ada": whole}, parts=4)
    assert attempt(limiter, 1, 0).usage.limits == KeyLimits(
        tokens_per_minute=3, concurrent_requests=1, queued_tokens=2, **same
    )
    config = GatewayConfig(replicas=4, key_limits={"ada": whole})
    assert config.own_share().key_limits == {"ada": whole}  # divided by KeyLimiter only


def test_a_key_with_a_weight_is_a_tenant() -> None:
    limiter = KeyLimiter({"ada": KeyLimits(weight=2), "bob": KeyLimits()})
    assert [limiter.weight(key) for key in ("ada", "bob", "eve", "")] == [2, 0, 0, 0]


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("limits_wait_s", "0", "gateway.limits_wait_s: "),
        ("key_reserve_quantile", "1", "gateway.key_reserve_quantile: "),
        ("key_reserve_quantile", "NaN", "gateway.key_reserve_quantile: "),
        ("limits_name", "", "gateway.limits_name: "),
    ],
)
def test_faulty_settings_of_limits_are_named(key: str, value: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(GatewayConfig, {key: value})
    assert fault in str(caught.value)
